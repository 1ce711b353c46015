"""Random transfers, and what they should do, in NumPy."""

import numpy as np

from magi_jax.plan import CommMeta, CommSpec

SRC_ROWS, DST_ROWS, PIECES = 24, 40, 32


def random_comm(rng, cp_size, *, with_self=False):
    """A random transfer: for every destination, disjoint runs of rows of random sources, at random
    places.
    """
    send = [[] for _ in range(cp_size)]
    recv = [[] for _ in range(cp_size)]
    used = np.zeros((cp_size, cp_size), int)
    for dst in range(cp_size):
        cursor = int(rng.integers(0, 3))
        for src in rng.permutation(cp_size):
            if src == dst and not with_self:
                continue
            row = 0
            while row < SRC_ROWS and len(recv[dst]) < PIECES - 1:
                row += int(rng.integers(0, 12))
                n_rows = min(int(rng.integers(1, 6)), SRC_ROWS - row, DST_ROWS - cursor)
                if n_rows < 1:
                    break
                slot = used[src, dst]
                send[src].append((dst, row, cursor, n_rows, slot))
                recv[dst].append((src, row, cursor, n_rows, slot))
                used[src, dst] += n_rows
                row += n_rows
                cursor += n_rows + int(rng.integers(0, 2))
    padding = (cp_size, SRC_ROWS, DST_ROWS, 0, 0)

    def table(pieces, key):
        longest = max(PIECES, max(map(len, pieces)))
        return np.array(
            [sorted(p, key=key) + [padding] * (longest - len(p)) for p in pieces], np.int32
        )

    spec = CommSpec(
        cp_size=cp_size,
        src_rows=SRC_ROWS,
        dst_rows=DST_ROWS,
        pair_rows=SRC_ROWS,
        self_rows=SRC_ROWS if with_self else 0,
        pieces=PIECES,
    )
    return CommMeta(table(send, lambda p: (p[0], p[4])), table(recv, lambda p: p[2]), spec)


def padded(comm, longest=4 * PIECES):
    """The same with room for as many pieces as any of the tests makes, so that one program serves
    all.
    """

    def pad(table):
        row = np.broadcast_to(
            np.array([comm.spec.cp_size, SRC_ROWS, DST_ROWS, 0, 0], np.int32),
            (len(table), longest - table.shape[1], 5),
        )
        return np.concatenate([table, row], axis=1)

    return CommMeta(pad(comm.send), pad(comm.recv), comm.spec)


def pairs(comm):
    """All ``(src, src_row, dst, dst_row)`` that a transfer moves."""
    for dst, table in enumerate(comm.recv):
        for src, src_row, dst_row, n_rows, _ in table:
            for i in range(n_rows):
                yield src, src_row + i, dst, dst_row + i


def numpy_cast(x, comm):
    y = np.zeros((comm.spec.cp_size, DST_ROWS, *x.shape[2:]), x.dtype)
    for src, src_row, dst, dst_row in pairs(comm):
        y[dst, dst_row] = x[src, src_row]
    return y


def numpy_reduce(y, comm):
    x = np.zeros((comm.spec.cp_size, SRC_ROWS, *y.shape[2:]), np.float64)
    for src, src_row, dst, dst_row in pairs(comm):
        x[src, src_row] += y[dst, dst_row]
    return x
