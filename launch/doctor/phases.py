"""Order the sends between nodes so that each path is measured by itself."""


def node_paths(ranks_per_node: int, world_size: int) -> list[list[tuple[int, int]]]:
    """List phases, each with the pairs (sender, receiver) that send at the same time.

    A pair's ranks have equal local indices on neighbouring nodes in a ring. No rank is in two pairs of a phase. Sends to next nodes
    come first, then sends to previous ones (only with three or more nodes). One node has no phases.
    """
    num_nodes = world_size // ranks_per_node
    steps = [1, -1] if num_nodes > 2 else [1]
    phases = []
    for step in steps:
        hops = [(node, (node + step) % num_nodes) for node in range(num_nodes)]
        # In an odd ring, both ends of the last hop are busy in the other phases.
        last = [hops.pop()] if num_nodes % 2 else []
        for part in (hops[::2], hops[1::2], last):
            pairs = [
                (one * ranks_per_node + local, other * ranks_per_node + local)
                for one, other in part
                for local in range(ranks_per_node)
            ]
            if pairs:
                phases.append(pairs)
    return phases if num_nodes > 1 else []
