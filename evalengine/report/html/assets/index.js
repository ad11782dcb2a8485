"use strict";
// The panel of one run in the list: everything that its manifest and results say, and the way to its page.
(() => {
  const { make } = report;

  /** A table of texts, the last two columns of which are numbers. */
  const table = (head, rows) => report.parts.sheet({ head, rows, numbers: [head.length - 2, head.length - 1] });

  /** The command that compares the runs of the ticked rows, and a button that copies it. */
  report.picks.compare = (rows) => {
    const oldest = [...rows].sort((a, b) => b - a);  // the list begins with the newest; A is the older one
    const folders = [...new Set(oldest.map((i) => report.data("folders")[i]).filter(Boolean))];
    if (folders.length < 2) return [make("span", "", folders.length ? "1 run ticked: tick another to compare" : "This row is no finished run")];
    const command = `python -m evalengine compare ${folders.join(" ")}`;
    const copy = make("button", "", "Copy");
    copy.type = "button";
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(command);
      copy.textContent = "Copied";
    });
    return [make("code", "", command), copy];
  };

  report.details.run = (row, item) => {
    const parts = [make("h2", "", item.title)];
    if (item.href !== null) {
      const link = make("a", "", "Open the run's page");
      link.href = item.href;
      parts.push(make("p", "", link));
    }
    parts.push(report.parts.facts({ pairs: item.facts }));
    if (item.metrics.length) {
      parts.push(make("h3", "", "Metrics"), table(["Metric", "Filter", "Value", "95 %"], item.metrics));
    }
    if (item.parts.length) {
      const below = make("details", "", make("summary", "", `Tasks and groups in it (${item.parts.length})`));
      below.append(table(["Name", "Metric", "Filter", "Value", "95 %"], item.parts));
      parts.push(below);
    }
    return make("div", "", ...parts);
  };
})();
