"use strict";
// What every page has: its data, and the one way by which text from outside enters the document (textContent).
const report = (() => {
  // Written as escapes, not shown: controls, lone surrogates, and the marks that reorder text. See markup.py: UNSEEN.
  const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

  const named = (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0");

  /** An element with a class and children; strings become text, never markup. */
  function make(name, className, ...children) {
    const element = document.createElement(name);
    if (className) element.className = className;
    for (const child of children.flat()) {
      if (child !== null && child !== undefined) element.append(child instanceof Node ? child : text(String(child)));
    }
    return element;
  }

  /** Text of unknown origin as a fragment: what cannot be seen is shown as its escape. */
  function text(value) {
    const fragment = document.createDocumentFragment();
    let from = 0;
    for (const match of value.matchAll(UNSEEN)) {
      if (match.index > from) fragment.append(value.slice(from, match.index));
      const mark = document.createElement("span");
      mark.className = "unseen";
      mark.textContent = named(match[0]);
      fragment.append(mark);
      from = match.index + match[0].length;
    }
    if (from < value.length) fragment.append(value.slice(from));
    return fragment;
  }

  /** The value that Page.data embedded. */
  const data = (name) => JSON.parse(document.getElementById("data-" + name).textContent);

  const opened = new Map();

  /** The items that Page.blocks embedded: get(i) -> Promise of item i; each((item, i) => ...) over all of them. */
  function blocks(name) {
    if (!opened.has(name)) {
      const { items, size } = data("blocks-" + name);
      const kept = new Map();
      const load = (number) => {
        if (!kept.has(number)) kept.set(number, inflate(document.getElementById(`block-${name}-${number}`).textContent));
        return kept.get(number);
      };
      opened.set(name, { items, size, load, get: async (i) => (await load(Math.floor(i / size)))[i % size] });
    }
    return opened.get(name);
  }

  async function inflate(packed) {
    const binary = atob(packed);
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  /** A number with its thousands apart and a fixed count of digits after the point. */
  function number(value, digits) {
    if (value === null || value === undefined) return "";
    const options = digits === null || digits === undefined ? { maximumFractionDigits: 6 }
      : { minimumFractionDigits: digits, maximumFractionDigits: digits };
    return value.toLocaleString("en-US", options);
  }

  return { make, text, data, blocks, number, details: Object.create(null), picks: Object.create(null), start: [] };
})();

document.addEventListener("DOMContentLoaded", () => {
  if (matchMedia("(max-width: 640px)").matches) for (const fold of document.querySelectorAll("details.fold")) fold.open = false;
  for (const work of report.start) work();
  const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.getAttribute("href").slice(1), a]));
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(entry.target.id)?.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-10% 0px -80% 0px" });
  for (const section of document.querySelectorAll("main section[id]")) watcher.observe(section);
});
