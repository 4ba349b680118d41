"""Prefix caches of one group, which outlive its epochs as far as the executors' KV does."""

from router.scheduling.kv.prefix_cache import PrefixCache
from router.scheduling.step import GroupInfo


class GroupCaches:
    """The prefix cache of each rank, from epoch to epoch.

    An epoch's end leaves in them what `salvage` let keep its name. What has become of that is known
    when the group forms again: ranks whose `kv_id` is one of the epoch before have that one's KV, and
    others have none. Of a rank that does not say, nobody knows.

    Args:
        are_logged: Whether somebody may ask what they hold.

    Attributes:
        by_rank: [dp_size] of the group; while it forms, of the last epoch.
    """

    def __init__(self, *, are_logged: bool) -> None:
        self._are_logged = are_logged
        self.by_rank: list[PrefixCache] = []
        self._kv_ids: tuple[str, ...] = ()
        self._layout = (0, 0)

    def begin_epoch(self, info: GroupInfo) -> list[PrefixCache]:
        """Returns the caches of a group that has formed, without what is there no more.

        The cache of a rank that lost its KV is emptied rather than made anew: subscribers are told of
        the blocks that are gone, and of no others.
        """
        old = list(zip(self._kv_ids, self.by_rank, strict=False))
        layout, self._layout = self._layout, (info.shape.block_size, info.shape.kv_window)
        if layout != self._layout:
            old.clear()
        kept = {kv_id: cache for kv_id, cache in old if kv_id and info.kv_ids.count(kv_id) == 1}
        caches = PrefixCache.of_group(info.shape, is_logged=self._are_logged)
        for rank, kv_id in enumerate(info.kv_ids):
            cache = kept.get(kv_id)
            if cache is None and rank < len(old) and old[rank][0] not in kept:
                cache = old[rank][1]
                cache.pool.evict_all()
            if cache is not None and cache.pool.num_blocks == info.shape.num_blocks[rank]:
                cache.num_queried_tokens = cache.num_hit_tokens = 0
                caches[rank] = cache
        self._kv_ids, self.by_rank = info.kv_ids, caches
        return caches

    def drop(self) -> None:
        """Forgets all that they hold: the next epoch begins with nothing."""
        self._kv_ids, self.by_rank = (), []
