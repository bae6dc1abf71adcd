// Draws the charts, switches between light and dark. Colours are the style sheet's: see report.css.
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

  const toggle = document.getElementById("theme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (page.dataset.theme ? page.dataset.theme === "dark" : prefersDark.matches);
  const name = () => (toggle.textContent = dark() ? "Light" : "Dark");
  toggle.addEventListener("click", () => {
    page.dataset.theme = dark() ? "light" : "dark";
    name();
  });
  toggle.hidden = false;
  name();

  draw();
})();
