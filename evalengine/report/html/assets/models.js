"use strict";
// The panel of one document under several models: its question and target, and what each model said.
(() => {
  const { make, number } = report;

  report.details.document = (row, item) => {
    const parts = [make("h2", "", item.name)];
    if (item.asked !== null) {
      const [question, target] = item.asked;
      parts.push(make("h3", "", "Question"), make("pre", "", question), make("h3", "", "Target"),
        make("pre", "", make("mark", "right", target)));
    }
    const body = item.answers.map(([name, answer, value, right]) => make("tr", "", make("td", "", name),
      make("td", "", answer === null ? make("span", "soft", "no answer") : make("code", right === null ? "" : right ? "right" : "wrong", answer)),
      make("td", "number", value === null ? "" : number(value))));
    const head = ["Model", "Answer", item.metric].map((title, i) => make("th", i > 1 ? "number" : "", title));
    parts.push(make("h3", "", "Answers"),
      make("div", "scroll", make("table", "", make("thead", "", make("tr", "", head)), make("tbody", "", body))));
    return make("div", "", ...parts);
  };
})();
