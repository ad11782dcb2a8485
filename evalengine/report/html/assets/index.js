"use strict";
// The panel of one run in the list: everything that its manifest and results say, and the way to its page.
(() => {
  const { make } = report;

  report.details.run = (row, item) => {
    const parts = [make("h2", "", item.title)];
    if (item.href !== null) {
      const link = make("a", "", "Open the run's page");
      link.href = item.href;
      parts.push(make("p", "", link));
    }
    const facts = item.facts.map(([name, value]) => make("div", "", make("dt", "", name), make("dd", "", value)));
    parts.push(make("dl", "facts", facts));
    if (item.metrics.length) {
      const head = ["Metric", "Filter", "Value", "Stderr"].map((title, i) => make("th", i > 1 ? "number" : "", title));
      const body = item.metrics.map((cells) => make("tr", "", cells.map((cell, i) => make("td", i > 1 ? "number" : "", cell))));
      parts.push(make("h3", "", "Metrics"),
        make("div", "scroll", make("table", "", make("thead", "", make("tr", "", head)), make("tbody", "", body))));
    }
    return make("div", "", ...parts);
  };
})();
