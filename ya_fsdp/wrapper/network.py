"""What the wrapper communicates with: the package ``yccl``, and nodes with a second shard."""

from __future__ import annotations

import torch.distributed as dist

from ..collectives import Collectives, YcclCollectives, open_handle
from ..secondary import Reshard
from .arguments import Arguments, Ranks


def collectives_of(args: Arguments, ranks: Ranks) -> Collectives | None:
    """The back end of every unit; ``None`` for ``torch.distributed``.

    Raises:
        ImportError: If ``use_yccl`` is set and there is no package ``yccl``.
    """
    if not args.use_yccl:
        return None
    intra, inter = _colours(args, ranks)
    stages = args.yccl_all_gather_stages
    handle = open_handle(intra, inter, all_gather_stages=stages, profile=args.profile)
    return YcclCollectives(handle, ranks.data)


def _colours(args: Arguments, ranks: Ranks) -> tuple[int, int]:
    """The user's, or: ranks of a node alike, and ranks of one place in their nodes alike."""
    given = args.yccl_intra_inter_expr
    if callable(given):
        given = given(dist.get_rank())
        if not (isinstance(given, tuple) and len(given) == 2):
            raise TypeError(
                "yccl_intra_inter_expr must return a pair (intra_color, inter_color), got "
                f"{given!r}"
            )
    if given is not None:
        return given
    node = dist.get_process_group_ranks(ranks.node)
    first = dist.get_process_group_ranks(ranks.data)[0]
    return node[0], first * dist.get_world_size() + node.index(dist.get_rank())


def after_forward(args: Arguments, ranks: Ranks) -> Reshard:
    """What the first ``hpz_first_layers_num`` modules do after forward; a collective call.

    Raises:
        ValueError: If nodes have different numbers of ranks, on all ranks.
    """
    data = dist.get_process_group_ranks(ranks.data)
    node = dist.get_process_group_ranks(ranks.node)
    nodes: list[list[int]] = [[] for _ in data]
    dist.all_gather_object(nodes, node, group=ranks.data)
    sizes = {len(each) for each in nodes}
    if len(sizes) > 1 or sorted(r for each in set(map(tuple, nodes)) for r in each) != data:
        raise ValueError(
            "hpz_first_layers_num needs nodes with equally many ranks of the "
            "data_parallel_process_group and no others, but "
            f"intra_node_data_parallel_process_group has {sorted(set(map(tuple, nodes)))} of {data}"
        )
    if len(node) == 1:
        return False, None
    return True, None if len(node) == len(data) else ranks.node
