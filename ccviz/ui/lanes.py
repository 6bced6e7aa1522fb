"""Several strategies at several sizes, as the settings in the sidebar ask for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ccviz.errors import UserError
from ccviz.jobs import Runner
from ccviz.models import ModelSpec
from ccviz.runs import Request, lane_requests
from ccviz.settings import Settings
from ccviz.strategies import make_strategy
from ccviz.tokens import encode_prompt
from ccviz.ui import controls, page


@dataclass(frozen=True)
class Choices:
    """What the sidebar's widgets say.

    ``system_size`` of a prompt under them is asked of `lanes`, since it depends on the model.
    """

    spec: ModelSpec
    strategies: list[str]
    options: dict[str, dict[str, Any]]
    budgets: dict[str, Any]
    details: dict[str, Any]
    recordings: dict[str, bool]

    @property
    def follow(self) -> str | None:
        """The lane whose answer the others are fed."""
        return "full" if self.recordings["follow"] else None

    def sizes_of(self, runner: Runner, prompt: str) -> tuple[int, int]:
        """Tokens of a prompt and of its frozen system part; zeros while the model is not loaded."""
        model = runner.model(self.spec)
        if model is None:
            return 0, 0
        encoded = encode_prompt(model.tokenizer, prompt, self.details["chat"], self.details["system"])
        return len(encoded.token_ids), encoded.system_size

    def lanes(self, prompt: str, label: str, system_size: int) -> dict[str, Request]:
        """The checked requests, a lane each.

        Raises
        ------
        UserError
            With one sentence on the first field that cannot be used.
        """
        if not self.strategies:
            raise UserError("No strategy is chosen: choose one or several in the sidebar.")
        if self.follow and self.follow not in self.strategies:
            raise UserError("Harm is measured against the full cache: add Full cache to the strategies.")
        sizes = controls.read_sizes(self.budgets["cache_size"])
        settings = self._settings(min(sizes), system_size)  # the smallest is the one that may leave no room
        by_name = controls.freezes_system(self.budgets)
        request = Request(
            prompt=prompt,
            settings=replace(settings, frozen_size=0) if by_name else settings,
            chat=self.details["chat"],
            system=self.details["system"],
            label=label,
            freeze_system=by_name,
        )
        lanes = lane_requests(request, self.strategies, sizes, self.options)
        for name, lane in lanes.items():
            strategy = make_strategy(lane.strategy, lane.options)
            if strategy.evicts:
                strategy.check_budget(lane.settings.cache_size, settings.frozen_size)
            else:
                lanes[name] = replace(lane, settings=replace(lane.settings, frozen_size=0))
        return lanes

    def _settings(self, size: int, system_size: int) -> Settings:
        budgets = {**self.budgets, "cache_size": size}
        return controls.make_settings(budgets, self.details, system_size, False, self.recordings)


def choose_lanes(spec: ModelSpec) -> Choices:
    """Draw strategies, budgets and details in the sidebar, below the model."""
    strategies, options = controls.choose_strategies()
    budgets = controls.choose_budgets(False, several_sizes=True)
    details = controls.choose_details()
    recordings = controls.choose_recordings(strategies, with_harm=True)
    page.end()
    return Choices(spec, strategies, options, budgets, details, recordings)
