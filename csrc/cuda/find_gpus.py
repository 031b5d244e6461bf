"""Print the CUDA architectures of this machine's GPUs, as CMake takes them; else what is missing, with exit status 1.

It asks the driver's library, so the answer is yes only where the CUDA kernels can run. Called by csrc/CMakeLists.txt.
"""

from __future__ import annotations

import ctypes
import sys

COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


def architecture(major: int, minor: int) -> str:
    """Return what to compile for a GPU of this compute capability, 8.0 or later."""
    if major == 9:
        return "90a-real"
    # GPUs after Hopper compile the PTX when they first use it.
    return f"{major}{minor}-real" if major < 9 else "90-virtual"


def capabilities() -> list[tuple[int, int]]:
    """Return the compute capability of each GPU. Raises OSError with what is missing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise OSError("no NVIDIA driver") from None
    count, value = ctypes.c_int(0), ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        raise OSError("no GPU that the NVIDIA driver can use")

    def attribute(number: int, device: int) -> int:
        if driver.cuDeviceGetAttribute(ctypes.byref(value), number, device):
            raise OSError(f"GPU {device} does not say what it is")
        return value.value

    return [
        (attribute(COMPUTE_CAPABILITY_MAJOR, device), attribute(COMPUTE_CAPABILITY_MINOR, device))
        for device in range(count.value)
    ]


def main() -> None:
    try:
        usable = sorted({architecture(*found) for found in capabilities() if found >= (8, 0)})
    except OSError as error:
        sys.exit(str(error))
    if not usable:
        sys.exit("no GPU of compute capability 8.0 or later")
    print(";".join(usable))


if __name__ == "__main__":
    main()
