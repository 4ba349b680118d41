"""A flood that is over must not leave a process at the size that it had in it."""

from protos.memory import TRIM_BYTES, Trimmer


def test_memory_is_given_back_once_each_time_that_much_of_it_became_free():
    free, trimmed = [0], []
    trimmer = Trimmer(lambda: free[0], lambda: trimmed.append(free[0]))

    def at(share: float) -> int:
        free[0] = int(share * TRIM_BYTES)
        trimmer.check()
        return len(trimmed)

    assert [at(0.5), at(0.9), at(3.0)] == [0, 0, 1]
    assert [at(3.0), at(3.9)] == [1, 1]  # what is free now was given back, or is too little
    assert [at(1.0), at(1.5), at(2.0)] == [1, 1, 2]  # some was used again, and is free again
