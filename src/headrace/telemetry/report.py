"""A run folder as one self-contained HTML page: no network, no script, light and dark."""

from __future__ import annotations

from html import escape
from pathlib import Path

from headrace.telemetry import svg
from headrace.telemetry.format import count, duration, percent
from headrace.telemetry.log import read_log
from headrace.telemetry.records import BUCKETS, EvalRecord, Record, RunSummary, StepRecord

FILE_NAME = "report.html"
NUMERICS = ("kl_infer_train/k1", "kl_infer_train/k3", "ess/token_raw", "mult_prob_error", "entropy", "grad_norm")

STYLE = """
:root{--bg:#fbfbfa;--card:#fff;--ink:#22272e;--dim:#6b7280;--rule:#e6e6e3;
--c0:#3b75af;--c1:#e8973a;--c2:#4a9d74;--c3:#c4575e;--c4:#8a6db5;--c5:#9aa5b1}
@media(prefers-color-scheme:dark){:root{--bg:#15181c;--card:#1d2126;--ink:#e4e7eb;--dim:#98a1ad;--rule:#2e343b;
--c0:#6aa5dd;--c1:#f0ae5e;--c2:#6fc298;--c3:#e07b81;--c4:#ab92d3;--c5:#7d8894}}
*{box-sizing:border-box}
body{margin:0;padding:28px;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1240px;margin:auto}h1{font-size:22px;margin:0 0 2px}h2{font-size:15px;margin:0}
.dim,.empty{color:var(--dim)}.note{color:var(--dim);font-size:13px;margin:0 0 8px}
.facts{display:flex;flex-wrap:wrap;gap:12px;margin:18px 0}
.fact{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:10px 16px;min-width:132px}
.fact b{display:block;font-size:20px;font-weight:600}
.grid-box{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,480px),1fr));gap:16px}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px 16px}
svg{width:100%;height:auto;display:block}svg text{fill:var(--dim);font-size:11px}
.grid{stroke:var(--rule)}.line{fill:none;stroke-linejoin:round}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:13px;color:var(--dim);margin-top:6px}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
table{border-collapse:collapse;width:100%}td{padding:3px 0;border-bottom:1px solid var(--rule)}
td:last-child{text-align:right;font-variant-numeric:tabular-nums}
.bad{color:var(--c3)}.good{color:var(--c2)}
"""


def write_report(run_folder: Path) -> Path:
    """Write RUN_FOLDER/report.html from its metrics.jsonl and return its path.

    Works while the run goes on: without a summary the page shows the steps so far. Raises DataError when the folder
    holds no run.
    """
    path = run_folder / FILE_NAME
    partial = path.with_suffix(".partial")
    partial.write_text(render_report(run_folder.resolve().name, read_log(run_folder)), encoding="utf-8")
    partial.replace(path)
    return path


def render_report(name: str, records: list[Record]) -> str:
    """The page as text."""
    steps = [r for r in records if isinstance(r, StepRecord)]
    evals = [r for r in records if isinstance(r, EvalRecord)]
    summary = next((r for r in reversed(records) if isinstance(r, RunSummary)), None)
    state = summary.reason if summary else f"{len(steps)} steps so far" if steps else "no step yet"
    cards = [*_learning(steps, evals), *_flow(steps, summary), *_numerics(steps), *_accounts(summary)]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main><h1>{escape(name)}</h1>"
        f'<div class="dim">{escape(state)}</div>{_facts(steps, evals, summary)}'
        f'<div class="grid-box">{"".join(cards)}</div></main></body></html>\n'
    )


def _facts(steps: list[StepRecord], evals: list[EvalRecord], summary: RunSummary | None) -> str:
    facts: list[tuple[str, str]] = []
    if evals:
        first, last = evals[0], evals[-1]
        change = percent(first.accuracy, 1) + (f" → {percent(last.accuracy, 1)}" if last is not first else "")
        facts.append((f"held-out accuracy, {last.prompts} prompts", change))
    if steps:
        last_step = steps[-1]
        facts.append(("steps", f"{last_step.version} of {last_step.steps}"))
        facts.append(("reward, first → last", f"{steps[0].reward_mean:.3f} → {last_step.reward_mean:.3f}"))
        facts.append(("largest lag", str(max(s.lag_max for s in steps))))
        facts.append(("verdict", last_step.verdict.replace("_", " ")))
    if summary is not None:
        facts.append(("training time", duration(summary.train_s)))
        if summary.train_s > 0:
            facts.append(("trained", f"{count((summary.trained_tok - summary.resumed_tok) / summary.train_s)} tok/s"))
        made = max(1, summary.generated_tok)
        facts.append(("wasted tokens", percent(sum(summary.wasted_tok.values()) / made, 1)))
    boxes = "".join(f'<div class="fact"><b>{escape(v)}</b><span class="dim">{escape(k)}</span></div>' for k, v in facts)
    return f'<div class="facts">{boxes}</div>'


def _learning(steps: list[StepRecord], evals: list[EvalRecord]) -> list[str]:
    reward = {"reward": [(float(s.version), s.reward_mean) for s in steps]}
    accuracy = {"accuracy": [(float(e.version), e.accuracy) for e in evals]}
    tokens = {
        "mean": [(float(s.version), s.response_tok_mean) for s in steps],
        "largest": [(float(s.version), float(s.response_tok_max)) for s in steps],
    }
    signal = {
        "zero-signal groups": [(float(s.version), s.zero_signal_frac) for s in steps],
        "rollouts that pass": [(float(s.version), s.pass_frac) for s in steps],
    }
    return [
        _card("Reward", "mean over the trained rollouts of each step", svg.line_chart(reward, smooth="reward")),
        _card("Held-out accuracy", "greedy, every held-out prompt once", svg.line_chart(accuracy, marks="accuracy")),
        _card("Response length", "tokens", svg.line_chart(tokens, zero=True)),
        _card(
            "Signal",
            "share of groups with equal rewards; share of rollouts that pass",
            svg.line_chart(signal, zero=True),
        ),
    ]


def _flow(steps: list[StepRecord], summary: RunSummary | None) -> list[str]:
    versions = [float(s.version) for s in steps]
    waits = {
        "busy": [s.train_s for s in steps],
        "waits for data": [s.wait_data_s for s in steps],
        "hand-off": [s.publish_s for s in steps],
        "held by the bound": [s.wait_bound_s for s in steps],
    }
    rates = {
        "production": [(float(s.version), s.production_per_s) for s in steps],
        "consumption": [(float(s.version), s.consumption_per_s) for s in steps],
    }
    lag = {
        "mean": [(float(s.version), s.lag_mean) for s in steps],
        "largest": [(float(s.version), float(s.lag_max)) for s in steps],
    }
    cards = [
        _card("Trainer", "seconds of each step", svg.stacked_chart(versions, waits)),
        _card("Rates", "usable rollouts per second; matched where the lines meet", svg.line_chart(rates, zero=True)),
        _card("Lag", "optimizer steps between sampling and training a token", svg.line_chart(lag, zero=True)),
    ]
    if summary is not None:
        whole = max(1, sum(summary.lag_hist.values()))
        shares = {f"lag {k}": 100 * v / whole for k, v in sorted(summary.lag_hist.items())}
        cards.append(_card("Trained tokens by lag", "per cent", svg.bar_chart(shares, unit=" %")))
    return cards


def _numerics(steps: list[StepRecord]) -> list[str]:
    cards = []
    for name in NUMERICS:
        points = [(float(s.version), s.metrics[name]) for s in steps if name in s.metrics]
        if name == "grad_norm":
            points = [(float(s.version), s.grad_norm) for s in steps]
        if points:
            cards.append(_card(name, "see docs/metrics.md", svg.line_chart({name: points})))
    return cards


def _accounts(summary: RunSummary | None) -> list[str]:
    if summary is None:
        return []
    made = max(1, summary.generated_tok)
    tokens = [("generated", count(summary.generated_tok)), ("trained", count(summary.trained_tok))]
    tokens += [("masked as stale", count(summary.masked_tok))] if summary.masked_tok else []
    tokens += [
        (f"wasted: {reason.replace('_', ' ')}", f"{count(tok)} ({percent(tok / made, 1)})")
        for reason, tok in sorted(summary.wasted_tok.items(), key=lambda item: -item[1])
        if tok
    ]
    groups = [("admitted", str(summary.admitted))]
    groups += [(b.replace("_", " "), str(summary.groups.get(b, 0))) for b in BUCKETS]
    verdict = ("good", "balanced") if summary.balanced else ("bad", "NOT balanced")
    ledger = f'<p class="note">The ledger is <b class="{verdict[0]}">{verdict[1]}</b>.</p>'
    lengths = {f"{10 * i}": 100 * share for i, share in enumerate(summary.accept_by_length)}
    return [
        _card("Tokens", "where they went", ledger + _table(tokens)),
        _card("Groups", "every admitted group ends in one bucket", _table(groups)),
        _card(
            "Accepted by length",
            "per cent of groups that trained, from short to long (deciles)",
            svg.bar_chart(lengths),
        ),
        _card(
            "Generator", "shares of its time", _table([(n, percent(v, 1)) for n, v in summary.generator_shares.items()])
        ),
    ]


def _table(rows: list[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in rows)
    return f"<table>{cells}</table>"


def _card(title: str, note: str, body: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2><p class="note">{escape(note)}</p>{body}</section>'
