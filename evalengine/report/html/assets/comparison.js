"use strict";
// The panel of a flip or of an output that parts: both answers, both outputs around the first differing token.
(() => {
  const { make, number } = report;
  const nat = (value) => (value === null ? "not known" : typeof value === "string" ? value : `${number(value, 4)} nat`);

  report.details.output = (row, item) => make("div", "", make("h2", "", item.name), ...asked(item), ...answers(item.flips), ...output(item));

  report.details.flip = async (row, item) => {
    const other = item.output === null ? null : await report.blocks("outputs").get(item.output);
    return make("div", "", make("h2", "", item.name), ...asked(item), ...answers([item.flip]), ...(other ? output(other) : []), ...choices(item.choices));
  };

  /** The document's question and target, where a run holds them. */
  function asked({ asked: known }) {
    if (known === null) return [];
    const [question, target] = known;
    return [make("h3", "", "Question"), make("pre", "", question), make("h3", "", "Target"), make("pre", "", make("mark", "right", target))];
  }

  function answers(flips) {
    return flips.flatMap((flip) => [
      make("h3", "", `Answer under ${[flip.metric, flip.filter].filter(Boolean).join(", ")}: ${flip.change}; cause: ${flip.cause}`),
      pair(flip.a, flip.b, (answer) => [answer === null ? make("span", "soft", "no answer") : make("span", "text", answer)],
        (side) => flip.metric === null ? null : `${flip.metric} ${side === "A" ? number(flip.score_a) : number(flip.score_b)}`),
    ]);
  }

  function output(item) {
    const where = item.position === null ? "Where the outputs part" : `Token ${item.position}, where the outputs part`;
    const parts = [make("h3", "", where)];
    if (item.a === null) return [...parts, make("p", "note", "One of the runs holds no text of its outputs.")];
    if (item.gap !== null) {
      const tie = item.near_tie === null ? "" : item.near_tie ? ": a near-tie is possible" : ": no near-tie";
      parts.push(make("p", "note", `Gap ${number(item.gap, 4)} nat${tie}.`));
    }
    parts.push(pair(item.a, item.b, (text, side) => [
      make("span", "soft", item.cut_before ? "… " : "", item.before),
      make("mark", side === "A" ? "" : "bad", text || "(ends)"),
      item[`cut_${side.toLowerCase()}`] ? make("span", "soft", " …") : null,
    ], (side) => {
      const ids = item[`ids_${side.toLowerCase()}`];
      if (ids === null) return null;
      const logprob = item[`logprob_${side.toLowerCase()}`];
      return `token ids ${ids.join(" ") || "(ends)"}; logprob of the first: ${nat(logprob)}`;
    }));
    if (!item.a && !item.b) parts.push(make("p", "note", "The texts are equal: only tokens that the texts leave out differ."));
    return parts;
  }

  /** A beside B: fill(value, side) makes the text's nodes, foot(side) a line below it or null. */
  function pair(a, b, fill, foot) {
    return make("div", "pair", [["A", a], ["B", b]].map(([side, value]) => {
      const under = foot(side);
      return make("div", "", make("p", "badge", side), make("pre", "", fill(value, side)), under === null ? null : make("p", "foot", under));
    }));
  }

  function choices(rows) {
    if (!rows.length) return [];
    const cell = (value, digits) => make("td", "number", value === null ? "" : typeof value === "string" ? value : number(value, digits));
    const known = (value) => typeof value === "number";
    const head = ["Request", "A", "B", "B − A"].map((title, i) => make("th", i ? "number" : "", title));
    const body = rows.map(([index, a, b]) => make("tr", "", make("td", "", String(index)), cell(a, 6), cell(b, 6),
      make("td", "number", known(a) && known(b) ? (b - a).toExponential(2) : "")));
    return [make("h3", "", "Log-likelihoods of the document's requests, nat"),
      make("div", "scroll", make("table", "", make("thead", "", make("tr", "", head)), make("tbody", "", body)))];
  }
})();
