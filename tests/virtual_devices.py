"""Settings of the process that JAX and NumPy read when they start, and whether there are GPUs."""

import ctypes
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


def cuda_devices() -> int:
    """Asks the driver itself: initialising JAX would fix its platform, and take memory of the devices."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if found else 0
