"""Settings of the process that JAX and NumPy read when they start."""

import os

NUM_DEVICES = 8


def prepare() -> None:
    """Makes eight devices of the CPU; has effect before JAX and NumPy are imported."""
    flag = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    # With fewer threads than this, virtual CPU devices that wait for each other can starve.
    os.environ.setdefault("PJRT_NPROC", "16")
    # The oracle's products are small: threads cost it more than they bring, most of all where
    # several test processes share the cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
