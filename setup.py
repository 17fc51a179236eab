"""The compiled core of `radixrt.tree`; everything else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "radixrt.tree._radix",
            sources=["radixrt/tree/module.cpp"],
            depends=["radixrt/tree/structure.h", "radixrt/tree/cache.h", "radixrt/tree/owners.h"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden"],
            language="c++",
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
