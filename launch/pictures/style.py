"""Holds the CSS of every HTML page: a column of cards, light or dark."""

COLOURS = (
    *("#2f6fb0", "#d9822b", "#3f8f4f", "#b0413e", "#7a5ca8"),
    *("#8c6d4f", "#c0699f", "#8a8f98", "#2f9aa0", "#b5a32c", "#5a4fcf", "#7f1d4e"),
)
"""Colours for the CSS classes c0, c1, .. on a light page: one for each part of a step's time."""
_IN_THE_DARK = (
    *("#6aa9e6", "#f0a45c", "#72c182", "#e5807c", "#b39be0"),
    *("#c2a282", "#e79cca", "#a3abb6", "#63c7cc", "#d6c65a", "#9d95f5", "#d9729f"),
)
NUM_COLOURS = len(COLOURS)


def _variables(colours: tuple[str, ...]) -> str:
    return " ".join(f"--c{number}: {colour};" for number, colour in enumerate(colours))


_RULES = """
:root { color-scheme: light dark; --page: #f4f5f7; --card: #ffffff; --ink: #1b1f24; --soft: #5b6470; --rule: #d9dde3;
  --grid: #e7eaee; --idle: #eceef1; --good: #1a7f4b; --warn: #a15c00; --bad: #c0262d;
  LIGHT }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --card: #1d2127; --ink: #e4e7eb; --soft: #9aa4b1; --rule: #353b44;
  --grid: #2a3038; --idle: #2a3038; --good: #5cc48b; --warn: #e3a34a; --bad: #ff7b7f;
  DARK } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 4px; }
p { margin: 4px 0 8px; }
.soft { color: var(--soft); }
.state { display: inline-block; font-size: 14px; font-weight: 600; padding: 1px 10px; border-radius: 12px; border: 1px solid;
  vertical-align: 4px; margin-left: 8px; }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
nav { margin: 8px 0 0; font-size: 14px; display: flex; flex-wrap: wrap; gap: 0 14px; }
nav a { color: var(--c0); text-decoration: none; }
nav a:hover { text-decoration: underline; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: 10px; margin: 18px 0; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 9px 13px; }
.tile b { display: block; font-size: 18px; line-height: 27px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile b.long { font-size: 13.5px; }
.tile span { color: var(--soft); font-size: 13px; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 16px 18px; margin: 14px 0; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(430px, 1fr)); gap: 6px 22px; }
.pair > div { display: flex; flex-direction: column; justify-content: space-between; }
.pair h3, section h3 { font-size: 14px; margin: 10px 0 0; font-weight: 600; }
svg { display: block; width: 100%; height: auto; } .wide + .wide { margin-top: 8px; }
svg text { font: 11.5px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--soft);
  font-variant-numeric: tabular-nums; }
svg text.lost { fill: var(--bad); font-size: 15px; }
svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--rule); } .idle { fill: var(--idle); background: var(--idle); }
svg .mark line { stroke: var(--soft); stroke-dasharray: 2 4; }
svg polyline { fill: none; stroke-width: 1.7; stroke-linejoin: round; }
svg polyline.broad { stroke-width: 7; opacity: 0.4; } svg polyline.dashed { stroke-dasharray: 5 4; }
.legend { font-size: 13px; color: var(--soft); margin: 6px 0 2px; }
.legend span { margin-right: 16px; white-space: nowrap; } .legend i { display: inline-block; width: 12px; height: 12px;
  border-radius: 3px; margin-right: 6px; vertical-align: -1px; } .legend i.dots { border-radius: 6px; }
.legend i.broad { height: 7px; opacity: 0.5; vertical-align: 2px; }
.legend i.dashed { height: 3px; vertical-align: 3px; }
.wide { overflow-x: auto; } .tall { max-height: 520px; overflow: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid var(--grid);
  vertical-align: top; } td.n, th.n { text-align: right; white-space: nowrap; }
td.text { overflow-wrap: anywhere; min-width: 260px; }
td.when, td.kind { white-space: nowrap; } tr:last-child td { border-bottom: 0; }
td i.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 8px; }
pre { margin: 8px 0 0; font: 13px/1.45 ui-monospace, "Cascadia Mono", "DejaVu Sans Mono", monospace; overflow-x: auto; }
code { font: 13px ui-monospace, "Cascadia Mono", "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
summary { color: var(--soft); cursor: pointer; } .tall + details { margin-top: 10px; }
.missing { color: var(--soft); font-style: italic; }
footer { color: var(--soft); font-size: 13px; margin-top: 22px; }
@media (max-width: 700px) { .wide > svg { min-width: 760px; } .wide > svg text.tick { font-size: 14px; } }
@media (max-width: 520px) { .pair { grid-template-columns: 1fr; } .pair svg text.tick { font-size: 15px; }
  main { padding: 18px 10px 40px; } section { padding: 12px; } }
@media print { body { background: #fff; } .tall { max-height: none; } section { break-inside: avoid; } }
"""

CSS = _RULES.replace("LIGHT", _variables(COLOURS)).replace("DARK", _variables(_IN_THE_DARK)) + "".join(
    f".c{number} {{ stroke: none; fill: var(--c{number}); background: var(--c{number}); }} "
    f"svg polyline.c{number} {{ stroke: var(--c{number}); fill: none; }}\n"
    for number in range(NUM_COLOURS)
)
