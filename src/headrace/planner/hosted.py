"""What a hosted service would charge for the same trained tokens, and where own chips break even."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.planner.assemble import CostBook
from headrace.planner.economics import break_even, hosted_for, hosted_usd_per_mtok
from headrace.planner.evaluate import Evaluated


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """One list price against one plan. Tokens: prompt and response, as services count."""

    provider: str
    hosted_usd_per_mtok: float
    own_usd_per_mtok: float
    break_even_usd_per_gpu_h: float
    """Chip-hours cheaper than this make the own run the cheaper one."""
    source: str
    date: str

    def words(self) -> str:
        cheaper = "cheaper" if self.own_usd_per_mtok < self.hosted_usd_per_mtok else "dearer"
        return (
            f"hosted: {self.provider} lists ${self.hosted_usd_per_mtok:.2f} per million prompt and response tokens of "
            f"this workload ({self.date}); this plan is {cheaper} at ${self.own_usd_per_mtok:.2f}, and breaks even at "
            f"${self.break_even_usd_per_gpu_h:.2f} per chip-hour"
        )


def hosted_lines(book: CostBook, best: Evaluated) -> tuple[Hosted, ...]:
    """Every known list price for the plan's model; empty where nobody lists it, or where chips cost nothing."""
    setting, work, step_s = best.setting, book.workload, best.metrics.step_s_mean
    usd_per_gpu_h = 3600.0 * book.usd_per_s(setting) / setting.gpus
    if usd_per_gpu_h <= 0:
        return ()
    prompt_tok = work.prompt_tok + work.tool_tok
    found = []
    for price in hosted_for(book.shape.name):
        hosted_usd = hosted_usd_per_mtok(
            price, prompt_tok=prompt_tok, response_tok=work.table.mean_tok, group_size=book.spec.group_size
        )
        even = break_even(
            gpus=setting.gpus,
            usd_per_gpu_h=usd_per_gpu_h,
            wall_s=step_s,
            trained_tok=book.spec.batch_samples * work.sample_tok,
            hosted_usd_per_mtok=hosted_usd,
        )
        found.append(
            Hosted(
                provider=price.provider,
                hosted_usd_per_mtok=hosted_usd,
                own_usd_per_mtok=even.own_usd_per_mtok,
                break_even_usd_per_gpu_h=even.gpu_usd_per_h,
                source=price.source,
                date=price.date,
            )
        )
    return tuple(found)
