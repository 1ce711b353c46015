"""The attention kernels that `kernels.py` times beside ours, by name."""

import importlib.util
from collections.abc import Callable

import flash_peers
import kernel_peers
import magi_peers
from kernel_peers import Case, Passes


def available(names: list[str]) -> dict[str, Callable[[Case], Passes]]:
    """The peers of these names whose packages are installed."""
    every = {
        "cudnn": (kernel_peers.cudnn, "jax"),
        "tokamax": (kernel_peers.tokamax, "tokamax"),
        "torch_sdpa": (kernel_peers.torch_sdpa, "torch"),
        "torch_varlen": (kernel_peers.torch_varlen, "torch"),
        "torch_flex": (kernel_peers.torch_flex, "torch"),
        "fa3": (flash_peers.fa3, "flash_attn_interface"),
        "fa3_jax": (flash_peers.fa3_jax, "dew_flash_attn"),
        "fa4_jax": (flash_peers.fa4_jax, "fa4_jax"),
        "ffa": (magi_peers.ffa, "magi_attention"),
        "ffa_catgqa": (magi_peers.ffa_catgqa, "magi_attention"),
    }
    if unknown := set(names) - set(every):
        raise ValueError(f"peers must be among {sorted(every)}, got {sorted(unknown)}")
    return {name: every[name][0] for name in names if importlib.util.find_spec(every[name][1])}
