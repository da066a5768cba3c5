"""The style sheet of the page: light and dark, for narrow and wide screens."""

PAGE = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1a1f26;--soft:#55606d;--line:#d7dde4;
--bar:#3a7bd5;--warn:#8a4b00;--warnbg:#fff4e0}
@media (prefers-color-scheme:dark){:root{--bg:#0f1318;--card:#181d24;--ink:#e7ebf0;--soft:#9ba6b3;
--line:#2e3640;--bar:#5b9bf0;--warn:#ffc37a;--warnbg:#2c2214}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:1rem/1.5 system-ui,-apple-system,
"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere}
header,main,footer{max-width:76rem;margin:0 auto;padding:0 1rem}
header{padding-top:1.75rem}
h1{font-size:1.75rem;line-height:1.2;margin:0}
h2{font-size:1.35rem;margin:2.5rem 0 .5rem}
h3{font-size:1.1rem;margin:2rem 0 .6rem;padding-bottom:.3rem;border-bottom:1px solid var(--line)}
h4{font-size:.9rem;margin:0}
p{margin:.5rem 0}
a{color:inherit;text-underline-offset:.2em}
.soft,footer,small,dt,.sk-sample code{color:var(--soft)}
.path{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.8125rem}
.tiles{display:grid;gap:.75rem;margin:1rem 0;padding:0;
grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr))}
.tiles div,.chart,.sk-sample,.scroll,pre{background:var(--card);border:1px solid var(--line);
border-radius:.6rem}
.tiles div{padding:.6rem .8rem}
.tiles dt{font-size:.75rem}
.tiles dd{margin:0;font-size:1.2rem;font-weight:600;line-height:1.3}
nav ul{display:flex;flex-wrap:wrap;gap:.25rem 1.1rem;list-style:none;margin:.75rem 0 0;padding:0;
font-size:.9rem}
.scroll{overflow-x:auto}
.scroll:focus-visible,a:focus-visible,summary:focus-visible{outline:2px solid var(--bar);
outline-offset:2px}
table{border-collapse:collapse;width:100%;font-size:.875rem}
th,td{padding:.4rem .8rem;text-align:left;vertical-align:top;border-top:1px solid var(--line)}
thead th{border-top:0;font-size:.75rem;font-weight:600;color:var(--soft);white-space:nowrap}
tbody th{font-weight:500}
tbody th,td{min-width:7rem}
td.number,th.number{text-align:right;white-space:nowrap;min-width:0;font-variant-numeric:tabular-nums}
.charts{display:grid;gap:.75rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,17rem),1fr));
margin-bottom:.75rem}
.chart{margin:0;padding:.7rem .9rem;min-width:0}
.chart svg{display:block;width:100%;height:4.5rem;margin-top:.5rem;
border-bottom:1px solid var(--line)}
.chart rect,.bar rect{fill:var(--bar)}
.axis{display:flex;justify-content:space-between;font-size:.75rem;color:var(--soft)}
.chart p{font-size:.8125rem;margin:.25rem 0 0}
.bar{display:block;width:100%;min-width:6rem;height:.7rem;margin-top:.35rem}
summary{cursor:pointer;color:var(--soft);font-size:.875rem;padding:.35rem 0}
details th,details td{padding:.15rem .3rem}
.warning{border-left:.3rem solid var(--warn);background:var(--warnbg);color:var(--warn);
padding:.5rem .8rem;border-radius:.3rem}
.sk-bad{color:var(--warn)}
pre{padding:.8rem 1rem;margin:.5rem 0;white-space:pre-wrap;font:.8125rem/1.6 ui-monospace,
SFMono-Regular,Menlo,Consolas,monospace;user-select:all}
footer{padding-top:2rem;padding-bottom:2rem;font-size:.8125rem}
@media print{.sk-sample,.chart{break-inside:avoid}}
"""
