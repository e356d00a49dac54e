"""Residency policies: one file each, and the table from their names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from difflib import get_close_matches
from pathlib import Path

from hisparsim.serving.policy import REQUIRED, PolicyError, ResidencyPolicy

POLICIES: dict[str, str] = {
    "gpu-only": "hisparsim.serving.policies.gpu_only:GpuOnly",
    "prefix-offload": "hisparsim.serving.policies.prefix_offload:PrefixOffload",
    "host-resident": "hisparsim.serving.policies.host_resident:HostResident",
    "hybrid": "hisparsim.serving.policies.hybrid:Hybrid",
    "never-admit": "hisparsim.serving.policies.never_admit:NeverAdmit",
    "thrash": "hisparsim.serving.policies.thrash:Thrash",
}
"""Name -> ``module:class``; imported when asked for."""


def policy_class(name: str) -> type[ResidencyPolicy]:
    """The policy class behind a name or a ``path/to/file.py:Class``.

    Raises:
        PolicyError: unknown name (the known ones are listed), missing file or class, or not a policy.
    """
    if name in POLICIES:
        module_name, class_name = POLICIES[name].split(":")
        found: object = getattr(importlib.import_module(module_name), class_name)
    elif ".py:" in name:
        found = _from_file(name)
    else:
        close = get_close_matches(name, POLICIES, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise PolicyError(f"unknown policy {name!r}: known are {', '.join(POLICIES)}{hint}")
    if not (isinstance(found, type) and issubclass(found, ResidencyPolicy)):
        raise PolicyError(f"{name!r} is not a subclass of hisparsim.serving.policy.ResidencyPolicy")
    missing = [method for method in REQUIRED if getattr(found, method) is getattr(ResidencyPolicy, method)]
    if missing:
        raise PolicyError(f"policy {name!r} lacks the methods {', '.join(missing)}")
    return found


def _from_file(name: str) -> object:
    path_text, class_name = name.rsplit(":", 1)
    path = Path(path_text)
    if not path.is_file():
        raise PolicyError(f"policy file {path_text!r} does not exist")
    module_name = f"hisparsim_user_policy_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        told = str(error) or type(error).__name__
        raise PolicyError(f"policy file {path_text!r} cannot be imported: {told}") from error
    if not hasattr(module, class_name):
        raise PolicyError(f"policy file {path_text!r} has no class {class_name!r}")
    return getattr(module, class_name)
