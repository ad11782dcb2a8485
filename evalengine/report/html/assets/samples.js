"use strict";
// The panel of one sample: the prompt, the output, how sure each token was, what every filter made of it.
(() => {
  const { make, number } = report;
  const HOT = 6;  // nat of surprise (-logprob) at which a token has its full colour: 1 in 400

  /** A text, or [beginning, characters left out, end] of a long one. */
  function long(text) {
    if (typeof text === "string") return [text];
    const note = make("span", "unseen", `… ${number(text[1], 0)} characters left out: see the samples file …`);
    return [text[0], note, text[2]];
  }

  const block = (title, text) => [make("h3", "", title), make("pre", "", long(text))];

  /** The parts of a request, by name; token texts are cut from the whole output, and mostly the scored text too. */
  function read([kind, text, sum, right, facts, whole, lengths, logprobs, omitted, thought]) {
    let from = 0;
    const texts = lengths.map((length) => whole.slice(from, from += length));
    return { kind, text: typeof text === "number" ? whole.slice(0, text) : text, sum, right, facts, texts, logprobs, omitted, thought };
  }

  /** Tokens on a ground as warm as they were surprising; a click or touch says how likely one was. */
  function tokens(request, readout, name = "pre") {
    const { texts, logprobs, omitted } = request;
    const line = make(name, "tokens");
    texts.forEach((text, i) => {
      const part = make("span", "", text);
      part.dataset.token = i;
      const value = logprobs[i];
      if (value !== undefined) part.style.setProperty("--heat", (0.75 * Math.min(1, value === null ? 1 : -value / 1000 / HOT)).toFixed(3));
      line.append(part);
    });
    if (request.thought) {
      const said = number(Math.min(request.thought, texts.length), 0);
      const fold = make("details", "thinking", make("summary", "", `Thinking, ${said} tokens`));
      fold.append(...[...line.children].slice(0, request.thought));
      line.prepend(fold);
    }
    if (omitted) line.append(make("span", "unseen", `… ${number(omitted, 0)} tokens left out: see records.parquet …`));
    const tell = (event) => {
      const part = event.target.closest("[data-token]");
      if (!part) return;
      line.querySelector("[aria-current]")?.removeAttribute("aria-current");
      part.setAttribute("aria-current", "true");
      const i = Number(part.dataset.token), value = logprobs[i];
      const chance = value === null ? "not finite" : `logprob ${number(value / 1000, 3)}, probability ${percent(Math.exp(value / 1000))}`;
      readout.replaceChildren(make("span", "", `token ${number(i + 1, 0)} of ${number(texts.length + omitted, 0)}`),
        make("span", "mono", JSON.stringify(texts[i])), make("span", "", chance));
    };
    line.addEventListener("click", tell);
    line.addEventListener("mouseover", tell);
    return line;
  }

  const percent = (share) => share >= 0.0005 ? number(100 * share, 1) + " %" : share.toExponential(1);

  const scale = () => make("p", "readout", make("span", "", "certain", make("i", "scale"), "surprising"), make("span", "", "point at a token for its logprob"));

  /** Whether a filter's answer is right by its first metric: true, false, or null for what is neither 0 nor 1. */
  function judged([, , scores]) {
    const value = scores.length ? Number(scores[0][1]) : NaN;
    return value === 1 ? true : value === 0 ? false : null;
  }

  const mood = (right) => right === null ? "" : right ? "right" : "wrong";

  /** The answer next to the target; the last line of a worked solution is its end. */
  function verdict(found, target) {
    const filter = found.find((one) => typeof one[1] === "string" && judged(one) !== null);
    if (!filter || typeof target !== "string") return [];
    const right = judged(filter), wanted = target.trim().split("\n").pop();
    const box = (title, text, look) => make("div", "", make("p", "badge", title), make("pre", "", make("mark", look, text || "(nothing)")));
    return [make("div", "pair judged", box(right ? "Answer: right" : "Answer: wrong", filter[1], mood(right)), box("Target", wanted, "right"))];
  }

  /** Marks the tokens that hold the answer where the output says it last. */
  function point(line, texts, answer, right) {
    const whole = texts.join(""), from = answer ? whole.lastIndexOf(answer) : -1;
    if (from < 0) return;
    let at = 0;
    texts.forEach((text, i) => {
      if (at < from + answer.length && at + text.length > from) line.querySelectorAll("[data-token]")[i].classList.add("said", mood(right) || "neither");
      at += text.length;
    });
  }

  /** One request's output: generated (the i-th of several samples), or scored (the i-th window of a long text). */
  function output(request, i, all, filter) {
    const { kind, text, sum, facts, texts } = request;
    const name = kind === "generate_until" ? "Output" : kind === "loglikelihood" ? "Scored text" : "Scored window";
    const nodes = [make("h3", "", all.length > 1 ? `${name} ${i + 1} of ${all.length}` : name)];
    if (texts.length) {
      const readout = scale(), line = tokens(request, readout);
      if (filter && all.length === 1) point(line, texts, filter[1], judged(filter));
      nodes.push(line, readout);
    } else if (text !== null) nodes.push(make("pre", "", long(text)));
    const said = facts.map(([name, value]) => `${name} ${value}`);
    if (sum !== null) said.push(`logprob ${number(sum, 3)}`);
    nodes.push(make("p", "note", said.join(", ")));
    if (texts.length && kind === "generate_until") {
      const scored = make("details", "", make("summary", "", "The text that was scored (stop strings cut)"), make("pre", "", long(text)));
      scored.open = request.thought > 0 && request.omitted > 0;  // the answer may be among the tokens left out
      nodes.push(scored);
    }
    return nodes;
  }

  /** Scored continuations, one under the other: the likeliest in bold, the right one ticked. */
  function choices(requests) {
    const known = requests.every((request) => request.sum !== null);  // else no share follows, and no likeliest
    const best = known ? Math.max(...requests.map((request) => request.sum)) : NaN;
    const weights = requests.map((request) => Math.exp(request.sum - best));
    const total = weights.reduce((a, b) => a + b, 0);
    const readout = scale();
    const rows = requests.map((request, i) => {
      const { text, sum, right, texts } = request;
      const shown = texts.length ? tokens(request, readout, "div") : make("div", "", long(text ?? ""));
      shown.classList.add("text");
      const figures = [sum === null ? "not finite" : number(sum, 2), known ? percent(weights[i] / total) : ""].map((figure) => make("span", "number", figure));
      const row = make("div", "choice", make("span", "badge", right ? "✓" : String(i)), shown, figures);
      if (right) row.classList.add("target");
      if (sum === best) row.classList.add("chosen");
      if (sum === best && !right && requests.some((request) => request.right)) row.classList.add("wrong");
      return row;
    });
    const coloured = requests.some((request) => request.texts.length);
    return [make("h3", "", "Choices, with log-likelihood and its share"), ...rows, coloured ? readout : null];
  }

  function filters(found) {
    const rows = found.map(([name, answer, scores]) => [name, answer === null ? "" : make("code", mood(judged([name, answer, scores])), long(answer)),
      scores.map(([m, v]) => `${m} ${v}`).join(", ")]);
    return report.parts.sheet({ head: ["Filter", "Answer", "Scores"], rows });
  }

  report.details.sample = (row, item) => {
    const [task, doc, prompt, target, found, , fields] = item;
    const requests = item[5].map(read);
    const scored = requests.length > 1 && requests.every((request) => request.kind === "loglikelihood");
    const filter = found.find((one) => typeof one[1] === "string" && one[1].trim());
    const outputs = scored ? choices(requests) : requests.flatMap((request, i, all) => output(request, i, all, filter));
    const top = scored ? [] : verdict(found, target);
    return make("div", "", make("h2", "", `${task}, document ${doc}`), top, filters(found), outputs,
      block("Target", target), block("Prompt", prompt), make("h3", "", "Document"), report.parts.facts({ pairs: fields.map(([name, value]) => [name, long(value)]) }));
  };
})();
