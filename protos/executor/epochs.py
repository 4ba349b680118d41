"""Range of epochs, which count the formings of a group."""

MAX_EPOCH = (1 << 63) - 1

# Of the next epoch above the newest that an executor has seen. Routers count one by one, on from the
# newest of any executor; a number out of the blue near the end would be the last. What an executor
# is behind the others by, after that, a router makes up for in such leaps.
MAX_EPOCH_LEAP = 1 << 32
