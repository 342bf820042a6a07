"""Users' functions from a path to what writes or reads there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from pytest_ckpt.errors import SettingError


def require_call(function: Callable[..., Any], what: str, name: str, *arguments: Any, **options: Any) -> None:
    """Raise `SettingError` where `function` cannot be called so; what tells no signature is taken as it is."""
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError as error:
        raise SettingError(
            f"{what} {name} cannot be called with a path: {error}; write a function whose first argument is the path"
        ) from error
    except ValueError:  # a builtin
        return
