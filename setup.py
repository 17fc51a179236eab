"""The compiled parts; everything else is in pyproject.toml."""

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError, LinkError


class Build(build_ext):
    def run(self) -> None:
        try:
            super().run()
        except (CompileError, ExecError, LinkError) as error:
            raise SystemExit(
                f"{error}\nradixrt has parts in C++: a C++17 compiler and Python's headers are needed"
                " (apt install g++ python3-dev, dnf install gcc-c++ python3-devel; CXX names another compiler)"
            ) from error


def extension(name: str, source: str, *headers: str) -> Extension:
    """One for all versions of Python from 3.11 on."""
    return Extension(
        name,
        sources=[source],
        depends=list(headers),
        define_macros=[("Py_LIMITED_API", "0x030B0000")],
        py_limited_api=True,
        extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden"],
        language="c++",
    )


TREE = "radixrt/tree/"
LAYERS = "radixrt/worker/model/layers/"
setup(
    cmdclass={"build_ext": Build},
    ext_modules=[
        extension(
            "radixrt.tree._radix",
            TREE + "module.cpp",
            TREE + "structure.h",
            TREE + "cache.h",
            TREE + "returns.h",
            TREE + "owners.h",
            TREE + "icicle.h",
            TREE + "align.h",
        ),
        extension("radixrt.tokens._ids", "radixrt/tokens/ids.cpp"),
        extension("radixrt.tokens._pieces", "radixrt/tokens/pieces.cpp"),
        extension("radixrt.frontend.http._shape", "radixrt/frontend/http/shape.cpp"),
        extension("radixrt.wire._heads", "radixrt/wire/heads.cpp"),
        extension("radixrt.worker.speculative._repeats", "radixrt/worker/speculative/repeats.cpp"),
        extension("radixrt.worker.model.layers._cpu_kernels", LAYERS + "cpu_kernels.cpp", LAYERS + "cpu_kernels.h"),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
