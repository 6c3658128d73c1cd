"""The look of the report page, and the few lines of JavaScript that draw its figures."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1d2127; --soft: #59616c; --line: #d9dde3; --band: #f5f6f8;
}
@media (prefers-color-scheme: dark) {
  :root { --paper: #111315; --ink: #e8eaed; --soft: #a3abb6; --line: #32373e; --band: #1a1d21; }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 17px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif;
}
main { max-width: 1160px; margin: 0 auto; padding: 3rem 1.5rem 4rem; }
h1 { font-size: 2.1rem; line-height: 1.2; letter-spacing: -0.015em; margin: 0 0 .6rem; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 0; }
.lead { font-size: 1.12rem; color: var(--soft); max-width: 46rem; margin: 0; }
.note { color: var(--soft); font-size: .92rem; margin: .1rem 0 0; }
section { margin-top: 3.2rem; }
.wide { overflow-x: auto; margin-top: 2.4rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
/* Where a table is wider than the page it scrolls, and what it is about stays. */
caption {
  text-align: left; color: var(--soft); padding-bottom: .7rem; font-size: .95rem;
  position: sticky; left: 0; max-width: min(1112px, 100vw - 3rem);
}
th, td { padding: .5rem .5rem; text-align: left; vertical-align: bottom; border-bottom: 1px solid var(--line); }
thead th { font-weight: 600; line-height: 1.25; border-bottom: 2px solid var(--ink); border-top: 2px solid var(--ink); }
thead small { font-weight: 400; color: var(--soft); font-size: .85em; }
tbody tr:last-child > * { border-bottom: 2px solid var(--ink); }
tbody tr:nth-child(even) > * { background: var(--band); }
tbody th { font-weight: 600; white-space: nowrap; }
.number { text-align: right; white-space: nowrap; }
figure { margin: .8rem 0 0; }
.plot { width: 100%; }
figcaption { color: var(--ink); font-size: .95rem; border-top: 1px solid var(--line); padding-top: .6rem; }
figcaption span { color: var(--soft); }
/* The figures' own grey is made to do on any ground; here the ground is known, so the ink can be darker or lighter. */
.plot g[class$="tick"] text, .plot text[class$="title"], .plot .legendtext, .plot .annotation-text,
.plot .textpoint text {
  fill: var(--ink) !important;
}
@media (max-width: 640px) { main { padding: 1.6rem 1rem; } h1 { font-size: 1.6rem; } body { font-size: 16px; } }
@media print { main { max-width: none; } section { break-inside: avoid; } }
"""

SCRIPT = """
const figures = JSON.parse(document.getElementById("figures").textContent);
const config = {responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"]};
figures.forEach((figure, place) => Plotly.newPlot(`figure-${place}`, figure.data, figure.layout, config));
"""
