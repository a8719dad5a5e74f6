"""Count the bytes of live tensors: on the device `meta` an oracle of peak memory that needs none."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Within its block, `peak_mib` is the most that the storages of the results of operations took at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, int] = {}  # by storage: how many tensors share it
        self._live = self._peak = 0

    @property
    def peak_mib(self) -> float:
        return self._peak / 2**20

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._tensors:
            self._live += size
            self._peak = max(self._peak, self._live)
        self._tensors[key] = self._tensors.get(key, 0) + 1
        weakref.finalize(tensor, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._tensors[key] -= 1
        if not self._tensors[key]:
            del self._tensors[key]
            self._live -= size
