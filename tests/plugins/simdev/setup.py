"""The one thing pyproject.toml cannot say: an extension built against torch's headers."""

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

SOURCES = ["streams", "memory", "backend", "operators", "library"]
# Not optimised, no debug symbols: what counts is how soon it is built; its kernels are the CPU's own.
FLAGS = ["-O0", "-g0", "-fvisibility=hidden", "-Wall", "-Wno-unused-function"]

setup(
    ext_modules=[
        CppExtension(
            "rlcore_simdev._C",
            [f"csrc/{name}.cpp" for name in SOURCES],
            extra_compile_args=FLAGS,
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
