"""The compiled module and these sources must be of one version; anything else is said at import."""

import hashlib
import re
from pathlib import Path

import pytest

from magi_jax.ops import ffi

FOLDER = Path(__file__).resolve().parents[2] / "xla_ffi"
# Of the operands, results, attributes and targets of all handlers. When those of a target change, raise
# INTERFACE in magi_jax/ops/ffi.py and kInterface in xla_ffi/common/registration.h, and store the new digest;
# a target that is new, which XLA misses by name in an older module, asks for the new digest alone.
DIGEST_OF_INTERFACE = {3: "5e94a65053eaf54d"}
BINDING = re.compile(r"\.(?:template )?(?:Arg|Ret|Attr|Remaining)\w*[<(].*|\{\"magi_jax_\w+\".*")


def _contract() -> str:
    """All lines of handlers that bind an operand or name a target, with the operands' names."""
    lines = []
    for path in sorted((FOLDER / "handlers").glob("*.cc")):
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
    ffi.check_interface(ffi.INTERFACE, "_ffi.so")


@pytest.mark.parametrize("found", [None, ffi.INTERFACE - 1, ffi.INTERFACE + 1])
def test_module_of_other_sources_is_refused(found):
    message = rf"_ffi\.so has interface {found} .* need {ffi.INTERFACE}: .* make setup"
    with pytest.raises(ImportError, match=message):
        ffi.check_interface(found, "_ffi.so")


def test_stale_module_is_refused_before_a_call_is_registered(monkeypatch):
    module = ffi.load()
    info = {name: value for name, value in module.build_info().items() if name != "interface"}
    stale = type("Stale", (), {"__file__": "old/_ffi.so", "build_info": staticmethod(lambda: info)})
    monkeypatch.setattr(ffi.importlib, "import_module", lambda _: stale)
    with pytest.raises(ImportError, match=r"old/_ffi\.so has interface None"):
        ffi.load.__wrapped__()
