// Draws the charts, sorts the tables, switches between light and dark. Colours are the style sheet's: see report.css.
"use strict";
(() => {
  const page = document.documentElement;

  function fail(what) {
    const notice = document.getElementById("failed");
    notice.hidden = false;
    notice.textContent = `A figure could not be drawn: ${what}`;
    page.dataset.failed = `${page.dataset.failed ?? ""}${what}\n`;
  }
  addEventListener("error", (event) => fail(event.message));
  addEventListener("unhandledrejection", (event) => fail(event.reason));

  const { config, figures } = JSON.parse(document.getElementById("charts").textContent);
  config.font = getComputedStyle(document.body).fontFamily; // not a variable: Vega measures texts with it
  const options = {
    mode: "vega-lite",
    renderer: "svg",
    actions: false,
    ast: true, // expressions are interpreted: the page's policy forbids eval
    defaultStyle: false,
    tooltip: { disableDefaultStyle: true },
    config,
  };

  async function draw() {
    let drawn = 0;
    for (const [id, spec] of Object.entries(figures)) {
      try {
        await vegaEmbed(document.getElementById(id), spec, options);
        drawn += 1;
      } catch (error) {
        fail(error);
      }
    }
    page.dataset.drawn = drawn;
  }

  function compare(one, other) {
    const [a, b] = [one, other].map((cell) => (cell.dataset.value === undefined ? NaN : Number(cell.dataset.value)));
    if (Number.isNaN(a) !== Number.isNaN(b)) return Number.isNaN(a) ? 1 : -1; // cells without a number stay last
    return Number.isNaN(a) ? one.textContent.localeCompare(other.textContent) : a - b;
  }

  function sort(heading) {
    const direction = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    const sign = direction === "ascending" ? 1 : -1;
    for (const other of heading.parentElement.children) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", direction);
    const [column, body] = [heading.cellIndex, heading.closest("table").tBodies[0]];
    const numbers = (row) => row.cells[column].dataset.value !== undefined;
    const rows = [...body.rows].sort((a, b) => {
      const order = compare(a.cells[column], b.cells[column]);
      return numbers(a) === numbers(b) ? sign * order : order;
    });
    body.append(...rows);
  }

  for (const button of document.querySelectorAll("table.sortable th button")) {
    button.addEventListener("click", () => sort(button.parentElement));
  }

  const toggle = document.getElementById("theme");
  const dark = () => (page.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const name = () => (toggle.textContent = dark() ? "Light" : "Dark");
  toggle.addEventListener("click", () => {
    page.dataset.theme = dark() ? "light" : "dark";
    name();
  });
  toggle.hidden = false;
  name();

  draw();
})();
