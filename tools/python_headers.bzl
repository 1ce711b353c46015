"""Headers that Python packages carry, as a repository: XLA's FFI (jaxlib) and pybind11."""

_FIND = "import jax.ffi, pybind11, sysconfig; print(" + \
        "jax.ffi.include_dir(), pybind11.get_include(), sysconfig.get_paths()['include'], sep='\\n')"

_BUILD = """
package(default_visibility = ["//visibility:public"])
cc_library(name = "xla_ffi", hdrs = glob(["xla_ffi/**/*.h"]), includes = ["xla_ffi"])
cc_library(
    name = "pybind11",
    hdrs = glob(["pybind11/**/*.h", "python/**/*.h"]),
    includes = ["pybind11", "python"],
)
"""

def _python_headers(repository):
    found = repository.execute([repository.path(repository.attr.python), "-c", _FIND])
    if found.return_code:
        fail("no jax and pybind11 in {}; run `make setup`: {}".format(
            repository.attr.python,
            found.stderr,
        ))
    for name, folder in zip(["xla_ffi", "pybind11", "python"], found.stdout.splitlines()):
        repository.symlink(folder, name)
    repository.file("BUILD", _BUILD)

python_headers = repository_rule(
    implementation = _python_headers,
    attrs = {"python": attr.label(mandatory = True)},
    doc = "Headers of the packages in the environment of the given Python.",
)
