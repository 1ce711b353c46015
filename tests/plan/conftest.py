"""Settings that must be made before JAX starts."""

import os

# Eight CPU devices. Many launches in flight starve a pool of fewer threads than that.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )
os.environ.setdefault("PJRT_NPROC", "16")
