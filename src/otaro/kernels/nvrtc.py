"""CUDA sources to kernels at first use: NVRTC, which every CUDA build of torch brings along, and the driver,
through ctypes.

`kernel("linear.cu", "linear", device, BITS=4, ...)` compiles a file of `cuda_src/` for the GPU at hand,
constants set with -D, and remembers what came out, on disk too (`$XDG_CACHE_HOME/otaro`). A kernel takes the
fields of one structure (`cuda_structs`) and is launched on torch's current stream, which may be captured into
a graph:

    kernel(grid, threads, x=tensor, tokens=1, ...)

A kernel starts as soon as the one before it lets it (compute capability 9.0), and waits inside for what the
other wrote: every source that is launched here calls `wait_for_predecessor` before it reads or writes
anything another kernel touches.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from contextlib import nullcontext, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from otaro.errors import KernelError, pip_install
from otaro.kernels.cuda_structs import HEADERS, SOURCES, assertions, filled, parameters

OLDEST = (8, 0)
"""The oldest compute capability that has the instructions of our kernels."""
HOPPER = ("hopper.cu", "hopper_halves.cu")
"""Have instructions of compute capability 9.0 alone, which later ones lack."""
_FLAGS = ("--std=c++17", "--extra-device-vectorization")
_STATIC_SHARED = 5 << 10  # left to what products declare themselves
_OPT_IN = "shared_memory_per_block_optin"  # which torch's own types do not know
_DECLARED_SHARED = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
_MOST_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


@cache
def missing(device: int) -> str:
    """Why kernels cannot be compiled or run on this GPU, in words; empty if they can."""
    if torch.version.hip:
        return "this torch is built for AMD GPUs, and the kernels are CUDA"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        have, need = (".".join(map(str, one)) for one in (capability, OLDEST))
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {have}, and the kernels need {need}"
        )
    try:
        _nvrtc(), _driver()
    except OSError as error:
        return (
            f"CUDA's compiler library could not be loaded ({error}); "
            f"`{pip_install('nvidia-cuda-nvrtc')}` brings it"
        )
    if 10 * capability[0] + capability[1] not in _architectures():
        return (
            f"{compiler()} does not know compute capability {'.'.join(map(str, capability))}; a newer "
            "torch may"
        )
    return ""


@cache
def most_shared(device: int) -> int:
    """Bytes of shared memory that a launch may ask for."""
    return _all_shared(device) - _STATIC_SHARED


def _all_shared(device: int) -> int:
    return int(getattr(torch.cuda.get_device_properties(device), _OPT_IN))


def compiler() -> str:
    """Name and version of what compiles."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"NVRTC {major.value}.{minor.value}"


class Launch:
    """One that can be made again and again, as long as its tensors live. Fields may be set in between."""

    def __init__(
        self, kernel: Kernel, grid: tuple[int, ...], threads: int, shared: int, fields: ctypes.Structure
    ) -> None:
        self.fields, self._kernel, self._empty = fields, kernel, not all(grid)
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(fields))
        across, down, deep = (*grid, 1, 1)[:3]
        attribute, count = ctypes.pointer(_Attribute(_PROGRAMMATIC, 0, 1)), int(kernel.dependent)
        self._config = _Config(across, down, deep, threads, 1, 1, shared, None, attribute, count)
        self._pointer = ctypes.byref(self._config)

    def __call__(self, stream: Any = None) -> None:
        """On a stream of torch's, or its current one."""
        device = self._kernel.device
        handle = (stream or torch.cuda.current_stream(device)).cuda_stream
        with nullcontext() if torch.cuda.current_device() == device else torch.cuda.device(device):
            enter_context(device)
            self.on(handle)

    def on(self, handle: int) -> None:
        """On the stream with this handle, by a thread that is in its GPU's context."""
        if self._empty:
            return
        self._config.stream = handle
        if status := self._kernel.launch(self._pointer, self._kernel.function, self._arguments, None):
            _ask(status, self._kernel.name)


class Kernel:
    """A compiled kernel on one GPU."""

    def __init__(self, image: bytes, file: str, name: str, device: int) -> None:
        driver = _driver()
        self.device, self.name, self._parameters = device, name, parameters(file)[name]
        self._module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            enter_context(device)
            _ask(driver.cuModuleLoadData(ctypes.byref(self._module), image), name)
            _ask(driver.cuModuleGetFunction(ctypes.byref(self.function), self._module, name.encode()), name)
            # Shared memory beyond 48 KiB has to be asked for once; how much a launch takes is said with the
            # launch.
            declared = ctypes.c_int()
            _ask(driver.cuFuncGetAttribute(ctypes.byref(declared), _DECLARED_SHARED, self.function), name)
            most = _all_shared(device) - declared.value
            _ask(driver.cuFuncSetAttribute(self.function, _MOST_DYNAMIC_SHARED, most), name)
        self.launch = driver.cuLaunchKernelEx
        self.dependent = torch.cuda.get_device_capability(device) >= (9, 0)

    def __call__(self, grid: tuple[int, ...], threads: int, shared: int = 0, /, **fields: Any) -> None:
        """Launch on torch's current stream."""
        self.bound(grid, threads, shared, **fields)()

    def bound(self, grid: tuple[int, ...], threads: int, shared: int = 0, /, **fields: Any) -> Launch:
        """The launch, to be made later."""
        return Launch(self, grid, threads, shared, filled(self._parameters, fields))

    def blocks_per_multiprocessor(self, threads: int, shared: int = 0) -> int:
        """How many blocks of so many threads run on a multiprocessor at a time."""
        count = ctypes.c_int()
        with torch.cuda.device(self.device):
            enter_context(self.device)
            status = _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(count), self.function, threads, ctypes.c_size_t(shared)
            )
            _ask(status, self.name)
        return count.value

    def clusters(self, blocks: int, threads: int, shared: int = 0) -> int:
        """How many clusters of so many blocks run on the GPU at a time."""
        count, attribute = ctypes.c_int(), _Attribute(_CLUSTER, 0, blocks, (ctypes.c_int * 15)(1, 1))
        config = _Config(blocks, 1, 1, threads, 1, 1, shared, None, ctypes.pointer(attribute), 1)
        with torch.cuda.device(self.device):
            enter_context(self.device)
            _ask(
                _driver().cuOccupancyMaxActiveClusters(
                    ctypes.byref(count), self.function, ctypes.byref(config)
                ),
                self.name,
            )
        return count.value


def kernel(file: str, name: str, device: int, **constants: int) -> Kernel:
    """The kernel `name` of a source file, compiled for this GPU with these constants."""
    return _kernel(file, name, device, tuple(sorted(constants.items())))


@cache
def _kernel(file: str, name: str, device: int, constants: tuple[tuple[str, int], ...]) -> Kernel:
    if reason := missing(device):
        raise KernelError(f"there are no kernels for this GPU: {reason}")
    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device)) + (
        "a" if file in HOPPER else ""
    )
    flags = (
        f"--gpu-architecture={architecture}",
        *_FLAGS,
        *(f"-D{key}={int(value)}" for key, value in constants),
    )
    return Kernel(_compiled(file, flags), file, name, device)


def _compiled(file: str, flags: tuple[str, ...]) -> bytes:
    """Machine code from the disk if it was compiled before."""
    sources = [source_of(file), *(one.read_bytes() for one in HEADERS)]
    key = hashlib.sha256(
        b"\0".join([compiler().encode(), *sources, *(flag.encode() for flag in flags)])
    ).hexdigest()
    path = _cache() / f"{key}.cubin"
    with suppress(OSError):
        return path.read_bytes()
    image = compile_source(file, sources[0], flags)
    with suppress(OSError):  # a cache that cannot be written costs time, nothing else
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as draft:
            draft.write(image)
        Path(draft.name).replace(path)
    return image


def source_of(file: str) -> bytes:
    """A file of `cuda_src/`, and that its structures lie as Python fills them."""
    return (SOURCES / file).read_bytes() + assertions(file).encode()


def compile_source(file: str, source: bytes, flags: tuple[str, ...]) -> bytes:
    """Machine code for the architecture that the flags name; needs no GPU."""
    library = _nvrtc()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    strings = ctypes.c_char_p * len(HEADERS)
    headers, names = (
        strings(*(one.read_bytes() for one in HEADERS)),
        strings(*(one.name.encode() for one in HEADERS)),
    )
    status = library.nvrtcCreateProgram(
        ctypes.byref(program), source, file.encode(), len(HEADERS), headers, names
    )
    try:
        options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        status = status or library.nvrtcCompileProgram(program, len(flags), options)
        if status:
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise KernelError(
                f"{compiler()} could not compile {file} "
                f"{' '.join(flags)}:\n{log.value.decode(errors='replace')}"
            )
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, image)
        return image.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "otaro"


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute; its value is a union of 64 bytes, of which we need the first word."""

    _fields_ = (
        ("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15),
    )  # fmt: skip


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid_x", ctypes.c_uint), ("grid_y", ctypes.c_uint), ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint), ("block_y", ctypes.c_uint), ("block_z", ctypes.c_uint),
        ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


@cache
def _nvrtc() -> Any:
    """The compiler of torch's CUDA version: loaded already, on the library path, or in an NVIDIA package."""
    major = (torch.version.cuda or "13").partition(".")[0]
    name = f"libnvrtc.so.{major}"
    with suppress(OSError):
        return ctypes.CDLL(name)
    spec = find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob(f"*/lib/{name}")):
            return ctypes.CDLL(str(path))
    raise OSError(f"{name} is not there")


def _architectures() -> list[int]:
    """Compute capabilities that the compiler knows, as 80, 90, ..."""
    count = ctypes.c_int()
    _nvrtc().nvrtcGetNumSupportedArchs(ctypes.byref(count))
    known = (ctypes.c_int * count.value)()
    _nvrtc().nvrtcGetSupportedArchs(known)
    return list(known)


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def enter_context(device: int) -> None:
    """Make torch's context the thread's current one: a fresh thread has none until the runtime is called."""
    current = ctypes.c_void_p()
    _ask(_driver().cuCtxGetCurrent(ctypes.byref(current)), "a context")
    if not current.value:
        context = ctypes.c_void_p()
        _ask(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "a context")
        _ask(_driver().cuCtxSetCurrent(context), "a context")


def _ask(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise KernelError(f"CUDA refused {what}: {(text.value or b'error').decode()} ({status})")
