"""A command that is also a group: `headrace plan spec.toml` plans, `headrace plan compare A B` compares."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class DefaultGroup(TyperGroup):
    """Arguments that do not begin with the name of a sub-command go to the sub-command called `default`."""

    default = "make"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = [self.default, *args]
        return super().parse_args(ctx, args)
