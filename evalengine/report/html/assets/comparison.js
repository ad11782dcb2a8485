"use strict";
// The panel of a flip or of a diverging output: both answers, both outputs around the first differing token.
(() => {
  const { make, number, parts } = report;
  const nat = (value) => (value === null ? "not known" : typeof value === "string" ? value : `${number(value, 4)} nat`);

  report.details.output = (row, item) => make("div", "", make("h2", "", item.name), question(item), item.flips.map((flip) => answers(flip)), output(item));

  report.details.flip = async (row, item) => {
    const other = item.output === null ? null : await report.blocks("outputs").get(item.output);
    return make("div", "", make("h2", "", item.name), question(item), answers(item.flip), other && output(other), choices(item.choices));
  };

  /** A document that got worse, which opens to all that is known of it. */
  parts.card = (item) => {
    const [old, other] = item.flip.texts.map((text) => (text ?? "no answer").slice(0, 60));
    const card = make("details", "card", make("summary", "", make("strong", "", item.name), make("span", "gist", `${old} → ${other}`)),
      question(item), answers(item.flip, item.names), item.output && output(item.output, item.names));
    card.open = item.open;
    return card;
  };

  /** The document's question and target, where a run holds them. */
  function question({ question: known }) {
    if (known === null) return null;
    const [question, target] = known;
    return [make("h3", "", "Question"), make("pre", "", question), make("h3", "", "Target"), make("pre", "", make("mark", "right", target))];
  }

  function answers({ metric, filter, change, cause, texts, scores }, names) {
    const looks = change === "right to wrong" ? ["right", "wrong"] : ["text", "text"];
    const shown = texts.map((text, i) => text === null ? make("span", "soft", "no answer") : make(looks[i] === "text" ? "span" : "mark", looks[i], text));
    const feet = scores.map((score) => metric === null ? null : `${metric} ${typeof score === "string" ? score : number(score)}`);
    const under = [metric, filter].filter((name) => name && name !== "none").join(", ");
    return [make("h3", "", `Answer under ${under}: ${change}; cause: ${cause}`), pair(shown, feet, names)];
  }

  function output({ position, gap, near_tie: near, texts, before, cut_before: cut, cut: ends, ids, logprobs }, names) {
    const title = make("h3", "", position === null ? "Where the outputs diverge" : `Token ${position}, where the outputs diverge`);
    if (texts === null) return [title, make("p", "note", "One of the runs holds no text of its outputs.")];
    const tie = near === null ? "" : near ? ": a near-tie is possible" : ": no near-tie";
    const shown = texts.map((text, i) => [make("span", "soft", cut ? "… " : "", before), make("mark", i ? "bad" : "", text || "(ends)"),
      ends[i] ? make("span", "soft", " …") : null]);
    const feet = texts.map((_, i) => ids && `token ids ${ids[i].join(" ") || "(ends)"}; logprob of the first: ${nat(logprobs[i])}`);
    const equal = texts.some(Boolean) ? null : make("p", "note", "The texts are equal: only tokens that the texts leave out differ.");
    return [title, gap === null ? null : make("p", "note", `Gap ${number(gap, 4)} nat${tie}.`), pair(shown, feet, names), equal];
  }

  /** A next to B, a line below each. */
  function pair(shown, feet, names = ["A", "B"]) {
    return make("div", "pair", shown.map((text, i) =>
      make("div", "", make("p", "badge", names[i]), make("pre", "", text), feet[i] ? make("p", "foot", feet[i]) : null)));
  }

  function choices(rows) {
    if (!rows.length) return null;
    const written = (value) => value === null ? "" : typeof value === "string" ? value : number(value, 6);
    const known = (value) => typeof value === "number";
    const cells = rows.map(([index, a, b]) => [index, written(a), written(b), known(a) && known(b) ? (b - a).toExponential(2) : ""]);
    return [make("h3", "", "Log-likelihoods of the document's requests, nat"), parts.sheet({ head: ["Request", "A", "B", "B - A"], rows: cells, numbers: [1, 2, 3] })];
  }
})();
