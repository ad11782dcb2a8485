"use strict";
// The panel of one document under several models: its question and target, and what each model said.
(() => {
  const { make, number } = report;

  report.details.document = (row, item) => {
    const parts = [make("h2", "", item.name)];
    if (item.question !== null) {
      const [question, target] = item.question;
      parts.push(make("h3", "", "Question"), make("pre", "", question), make("h3", "", "Target"),
        make("pre", "", make("mark", "right", target)));
    }
    const rows = item.answers.map(([name, answer, value, right]) => [name,
      answer === null ? make("span", "soft", "no answer") : make("code", right === null ? "" : right ? "right" : "wrong", answer), value === null ? "" : number(value)]);
    parts.push(make("h3", "", "Answers"), report.parts.sheet({ head: ["Model", "Answer", item.metric], rows, numbers: [2] }));
    return make("div", "", ...parts);
  };
})();
