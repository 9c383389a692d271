"""Read torch DCP checkpoints without running code that a stranger put into them.

A checkpoint's `.metadata` is a pickle, and unpickling can call anything. This reader knows the few classes that torch
writes there, and refuses a file that names another. It hides entries that are not tensors: torch would unpickle their
content.
"""

import pickle
from pathlib import PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.serialization import _get_layout

_CLASSES = (
    dcp.BytesStorageMetadata,
    dcp.ChunkStorageMetadata,
    dcp.Metadata,
    dcp.MetadataIndex,
    dcp.StorageMeta,
    dcp.TensorProperties,
    dcp.TensorStorageMetadata,
    dcp._MEM_FORMAT_ENCODING,
    _StorageInfo,
    torch.Size,
)


def _memory_format(owner: Any, name: str) -> Any:
    """Stand in for `getattr`, with which Python 3.11 pickles members of an enumeration."""
    if owner is not dcp._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"expected getattr on a memory format, got it on {owner!r}")
    return owner[name]


_KNOWN: dict[tuple[str, str], Any] = {
    **{(known.__module__, known.__name__): known for known in _CLASSES},
    ("torch.serialization", "_get_layout"): _get_layout,
    ("builtins", "getattr"): _memory_format,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,  # Python 3.13
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names, if torch writes it into metadata."""
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(
                f"expected only classes that torch writes into metadata, got {module}.{name}, which may run code"
            )
        return _KNOWN[module, name]


class SafeReader(FileSystemReader):
    """torch's reader, which does not trust the files that it reads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read `.metadata`.

        Raises:
            pickle.UnpicklingError: It names anything but tensors and their places.
        """
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        entries = metadata.state_dict_metadata.items()
        metadata.state_dict_metadata = {
            name: one for name, one in entries if isinstance(one, dcp.TensorStorageMetadata)
        }
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
