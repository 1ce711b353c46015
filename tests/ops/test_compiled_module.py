"""The compiled module and these sources must be of one version; anything else is said at import."""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import magi_jax as mj
from magi_jax import compiled_module
from magi_jax.ops import ffi
from magi_jax.solver import engine

FOLDER = Path(__file__).resolve().parents[2] / "xla_ffi"
# Of the operands, results, attributes and targets of all handlers. When those of a target change, raise
# INTERFACE in magi_jax/ops/ffi.py and kInterface in xla_ffi/common/registration.h, and store the new digest;
# a target that is new, which XLA misses by name in an older module, asks for the new digest alone.
DIGEST_OF_INTERFACE = {5: "5156eca92a58c720"}
BINDING = re.compile(r"\.(?:template )?(?:Arg|Ret|Attr|Remaining)\w*[<(].*|\{\"magi_jax_\w+\".*")


def _contract() -> str:
    """All lines of handlers and their headers that bind an operand or name a target, with their names."""
    lines = []
    for path in sorted((FOLDER / "handlers").glob("*.[ch]*")):
        lines += [" ".join(line.split()) for line in BINDING.findall(path.read_text())]
    assert len(lines) > 50
    return "\n".join(lines)


def test_interface_number_changes_with_the_contract():
    digest = hashlib.sha256(_contract().encode()).hexdigest()[:16]
    assert DIGEST_OF_INTERFACE == {ffi.INTERFACE: digest}
    text = (FOLDER / "common" / "registration.h").read_text()
    assert f"constexpr int kInterface = {ffi.INTERFACE};" in text


def test_module_of_these_sources_is_taken():
    assert ffi.build_info()["interface"] == ffi.INTERFACE
    assert engine.compiled().interface == engine.INTERFACE


@pytest.mark.parametrize("found", [None, 6, 8])
def test_module_of_other_sources_is_refused(found):
    compiled_module.check_interface(7, 7, path="_ffi.so", contract="all calls")
    message = (
        rf"_ffi\.so has interface {found} of all calls.* need 7: .* make setup .* folder; or rest\."
    )
    with pytest.raises(ImportError, match=message):
        compiled_module.check_interface(
            found, 7, path="_ffi.so", contract="all calls", otherwise="; or rest"
        )


def test_stale_module_is_refused_before_a_call_is_registered(monkeypatch):
    module = ffi.load()
    info = {name: value for name, value in module.build_info().items() if name != "interface"}
    stale = type("Stale", (), {"__file__": "old/_ffi.so", "build_info": staticmethod(lambda: info)})
    monkeypatch.setattr(ffi.importlib, "import_module", lambda _: stale)
    with pytest.raises(ImportError, match=r"old/_ffi\.so has interface None"):
        ffi.load.__wrapped__()


RUN_EXPORTED = """
import sys
import jax
import numpy as np
import magi_jax as mj
mj.build_info()  # registers the custom calls
x = np.ones((8, 2, 4), np.float32)
print(jax.export.deserialize(sys.stdin.buffer.read()).call(x))
"""


@pytest.mark.parametrize("older", [False, True], ids=["same interface", "older interface"])
def test_exported_program_of_another_interface_is_refused_by_name(older, monkeypatch):
    x, mask = np.ones((8, 2, 4), np.float32), mj.masks.causal(8)
    ffi.load()
    if older:
        monkeypatch.setattr(ffi, "INTERFACE", ffi.INTERFACE - 1)
    target = ffi.target("magi_jax_ffa_forward")
    exported = jax.export.export(
        jax.jit(lambda x: mj.flex_flash_attention(x, x, x, mask)),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(target)],
    )(x)
    command = [sys.executable, "-c", RUN_EXPORTED]
    process = subprocess.run(command, input=exported.serialize(), capture_output=True, check=False)
    assert (process.returncode != 0) == older, process.stderr.decode()
    refusal = f"No FFI handler registered for {target}"
    assert (refusal in process.stderr.decode()) == older
