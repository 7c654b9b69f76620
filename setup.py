"""Builds ``knit_data._C`` from csrc/*.cpp. Everything else about the package is in pyproject.toml.

The extension sees the LibTorch stable ABI and the CPython limited API only, so one abi3 wheel serves every
torch >= 2.10 and every CPython >= 3.10. Without it the package runs on its Python reference kernels:
``KNIT_NO_EXT=1`` asks for that, and a missing compiler or torch leads to it.
"""

import os
import shlex
import shutil
import sys
from glob import glob

from setuptools import setup

TORCH_TARGET = "0x020a000000000000"  # 2.10.0; hides every newer function from the headers
PYTHON_TARGET = "0x030A0000"  # 3.10, like the wheel's tag cp310 below; torch adds the lowest Python that it supports


def why_pure_python() -> str | None:
    """The reason to build without the extension, or None."""
    if os.environ.get("KNIT_NO_EXT", "0") not in ("", "0"):
        return "KNIT_NO_EXT is set"
    try:
        from torch.utils.cpp_extension import get_cxx_compiler
    except ImportError as error:
        return f"torch cannot be imported ({error}); install it, then build with --no-build-isolation"
    compiler = shlex.split(get_cxx_compiler())[0]
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler!r}; install one, or name one in CXX"
    return None


reason = why_pure_python()
if reason is not None:
    print(f"knit_data: building WITHOUT the C++ extension: {reason}.", file=sys.stderr)
    setup()
else:
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    extension = CppExtension(
        name="knit_data._C",
        sources=sorted(glob("csrc/*.cpp")),  # relative: absolute sources break sdists and editable installs
        depends=sorted([*glob("csrc/*.h"), *glob("csrc/third_party/*/*")]),  # included by them, and part of an sdist
        extra_compile_args={
            "cxx": [
                "-O3",
                "-g0",  # Python's own flags say -g: 590 KB instead of 60
                "-Wall",
                "-pthread",
                "-fvisibility=hidden",
                f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
                f"-DPy_LIMITED_API={PYTHON_TARGET}",
            ]
        },
        py_limited_api=True,
    )
    setup(
        ext_modules=[extension],
        cmdclass={"build_ext": BuildExtension},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )
