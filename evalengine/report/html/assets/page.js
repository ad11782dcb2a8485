"use strict";
// What every page has: its data, its elements and tables, and the one way by which text enters the document (textContent).
const report = (() => {
  // Written as escapes, not shown: controls, lone surrogates, and the marks that reorder text. See markup.py: UNSEEN.
  const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

  const named = (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0");

  /** Text where no element can mark an escape: in attributes and in SVG. */
  const escaped = (value) => value.replace(UNSEEN, named);

  const SVG = new Set(["svg", "g", "path", "rect", "circle", "text", "polygon", "title"]);
  const HTML = new Set(["a", "b", "code", "details", "div", "figcaption", "figure", "h3", "i", "li", "nav", "p", "pre", "span", "strong", "summary", "ul"]);
  const page = JSON.parse(document.getElementById("page").textContent);
  const parts = Object.create(null);  // builders of components, by name

  /** An HTML element with a class and children; strings become text, never markup. */
  function make(name, className, ...children) {
    const element = document.createElement(name);
    if (className) element.className = className;
    element.append(...children.map(build));
    return element;
  }

  /** The node of a value: text, an element ({is, attributes, in}), a component, or several of these. */
  function build(value) {
    if (value instanceof Node) return value;
    if (typeof value !== "object") return text(String(value ?? ""));
    if (value === null || Array.isArray(value)) {
      const several = document.createDocumentFragment();
      several.append(...(value ?? []).map(build));
      return several;
    }
    const { is, in: children, ...attributes } = value;
    if (is in parts) return parts[is](value);
    if (!SVG.has(is) && !HTML.has(is) || "href" in attributes && !/^[#.]/.test(attributes.href)) return text(JSON.stringify(value));
    const element = SVG.has(is) ? document.createElementNS("http://www.w3.org/2000/svg", is) : document.createElement(is);
    for (const [name, setting] of Object.entries(attributes)) element.setAttribute(name, setting === true ? "" : escaped(String(setting)));
    element.append(...(children ?? []).map((child) => SVG.has(is) && typeof child === "string" ? escaped(child) : build(child)));
    return element;
  }

  /** best: [row, column] of bold cells. about: what a column means, by its title. */
  parts.sheet = ({ head, rows, numbers = [], best = [], about = {}, look = "" }) => {
    const kind = (i) => numbers.includes(i) ? "number" : "";
    const bold = new Set(best.map(String));
    const top = head.map((title, i) => {
      const cell = make("th", kind(i), title);
      cell.scope = "col";
      if (Object.hasOwn(about, title)) cell.title = about[title];
      return cell;
    });
    const body = rows.map((row, r) => make("tr", "", row.map((cell, i) => make("td", kind(i), bold.has(`${r},${i}`) ? make("strong", "", cell) : cell))));
    const scroll = make("div", "scroll", make("table", look, make("thead", "", make("tr", "", top)), make("tbody", "", body)));
    scroll.tabIndex = 0;
    return scroll;
  };

  parts.facts = ({ pairs }) => make("dl", "facts", pairs.map(([name, value]) => make("div", "", make("dt", "", name), make("dd", "", value))));

  parts.tiles = ({ tiles, look = "" }) => make("div", `tiles ${look}`, tiles.map(([label, figure, word]) =>
    make("div", "", make("p", "label", label), make("p", "figure", figure), make("p", "word", word))));

  parts.verdict = ({ word, sentence, good, look = "" }) => make("div", `verdict ${good === null ? "plain" : good ? "good" : "bad"} ${look}`,
    make("p", "word", word), make("p", "sentence", sentence));

  /** Everything from the page's one value: navigation, heading, sections. */
  function fill() {
    const { title, eyebrow, lead, sections } = page;
    const logo = build({ is: "svg", class: "logo", viewBox: "0 0 24 24", "aria-hidden": true, in: [{ is: "path", d: "M2 12h4l3-8 4 16 3-11 2 3h4" }] });
    const drawn = sections.map((own) => {
      const section = make("section", "", make("h2", "", own.title), own.note === null ? null : make("p", "note", own.note), own.in);
      section.id = own.name;
      return section;
    });
    document.querySelector("main").replaceChildren(make("header", "", make("p", "eyebrow", logo, eyebrow), make("h1", "", title), lead), ...drawn);
    if (drawn.length < 2) return;
    const links = sections.map((own) => ({ is: "a", href: `#${own.name}`, in: [own.title] }));
    document.body.prepend(build({ is: "nav", "aria-label": "Sections", in: links }));
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
  const data = (name) => page.data[name];

  const opened = new Map();

  /** The items that Page.blocks embedded: get(i) -> Promise of item i; each((item, i) => ...) over all of them. */
  function blocks(name) {
    if (!opened.has(name)) {
      const { items, size } = data("blocks-" + name);
      const cached = new Map();
      const load = (number) => {
        if (!cached.has(number)) cached.set(number, inflate(document.getElementById(`block-${name}-${number}`).textContent));
        return cached.get(number);
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

  return { make, build, parts, fill, text, data, blocks, number, details: Object.create(null), picks: Object.create(null), start: [] };
})();

document.addEventListener("DOMContentLoaded", () => {
  report.fill();
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
