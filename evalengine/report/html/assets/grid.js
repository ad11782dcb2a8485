"use strict";
// The grid: any number of rows, of which only those in sight are elements. Search, filters, sorting, a panel per row.
(() => {
  const HEIGHT = 36;  // px of a row; page.css has the same
  const SPARE = 8;  // rows rendered above and below the visible ones
  const { make } = report;
  const grids = new Map();

  class Grid {
    constructor(root) {
      this.root = root;
      this.name = root.dataset.grid;
      Object.assign(this, report.data("grid-" + this.name));  // columns, rows, detail, blocks, noun
      this.order = this.rows.map((_, i) => i);
      this.found = this.order;
      this.picked = new Set();
      this.sorted = null;  // [column, direction]
      this.chosen = new Map();  // column -> value that rows must have
      this.query = "";
      this.turn = 0;  // of searches: an older one gives way
      this.current = null;
      this.build();
      this.apply();
    }

    build() {
      this.search = make("input", "search");
      Object.assign(this.search, { type: "search", placeholder: `Search ${this.noun}`, spellcheck: false, autocomplete: "off" });
      this.search.setAttribute("aria-label", `Search ${this.noun}`);
      let timer;
      this.search.addEventListener("input", () => {
        clearTimeout(timer);
        timer = setTimeout(() => { this.query = this.search.value.trim().toLowerCase(); this.apply(); }, 150);
      });
      this.count = make("p", "count");
      this.count.setAttribute("role", "status");
      const tools = make("div", "tools", this.search, this.columns.map((c, i) => this.chooser(c, i)), this.count);
      this.head = make("div", "grid-head");
      this.head.setAttribute("role", "row");
      this.columns.forEach((column, i) => this.head.append(this.header(column, i)));
      this.space = make("div", "grid-space");
      this.body = make("div", "grid-body", this.space);
      this.body.tabIndex = 0;
      this.body.addEventListener("scroll", () => requestAnimationFrame(() => this.draw()), { passive: true });
      this.body.addEventListener("keydown", (event) => this.key(event));
      const frame = make("div", "grid-frame", this.head, this.body);
      frame.setAttribute("role", "grid");
      this.bar = make("div", "picked");
      this.bar.hidden = true;
      this.root.replaceChildren(tools, this.bar, frame);
      new ResizeObserver(() => { this.lay(); this.draw(); }).observe(this.root);
      this.lay();
    }

    header(column, i) {
      const button = make("button", column.kind, column.title);
      Object.assign(button, { type: "button", title: column.about });
      button.addEventListener("click", () => {
        const [old, way] = this.sorted ?? [];
        this.sorted = old !== i ? [i, 1] : way === 1 ? [i, -1] : null;
        this.apply();
      });
      const cell = make("div", "", button);
      cell.setAttribute("role", "columnheader");
      return cell;
    }

    /** A select for a column of few values; null for the others. */
    chooser(column, i) {
      if (!column.choose && column.kind !== "mark") return null;
      const values = [...new Set(this.rows.map((row) => row[i]))].filter((v) => v !== null);
      if (values.length < 2) return null;
      values.sort((a, b) => (a === true ? -1 : b === true ? 1 : compare(a, b)));
      const select = make("select", "", make("option", "", `${column.title}: all`));
      for (const value of values) select.append(make("option", "", this.show(column, value)));
      select.setAttribute("aria-label", column.title);
      select.addEventListener("change", () => {
        if (select.selectedIndex) this.chosen.set(i, values[select.selectedIndex - 1]); else this.chosen.delete(i);
        this.apply();
      });
      return select;
    }

    show(column, value) {
      if (value === null) return "";
      if (column.kind === "mark") return column.marks[value ? 0 : 1];
      return typeof value === "number" ? report.number(value, column.digits) : value;
    }

    /** Rows that pass filters and search, in order. The texts in blocks are read when a search first needs them. */
    async apply() {
      const turn = ++this.turn;
      let found = this.order.filter((i) => [...this.chosen].every(([c, value]) => this.rows[i][c] === value));
      if (this.query) found = await this.matching(found, turn);
      if (turn !== this.turn) return;
      if (this.sorted) {
        const [column, way] = this.sorted;
        const value = (i) => this.rows[i][column];
        const nothing = (a, b) => (value(a) === null) - (value(b) === null);  // last, whichever way
        found = [...found].sort((a, b) => nothing(a, b) || way * compare(value(a), value(b)) || a - b);
      }
      this.found = found;
      [...this.head.children].forEach((cell, i) => {
        const way = this.sorted?.[0] === i ? this.sorted[1] : 0;
        cell.setAttribute("aria-sort", way === 1 ? "ascending" : way === -1 ? "descending" : "none");
      });
      this.say();
      this.space.style.height = `${found.length * HEIGHT}px`;
      this.body.scrollTop = 0;
      this.clear();
      this.draw();
    }

    async matching(candidates, turn) {
      const query = this.query;
      const store = this.blocks ? report.blocks(this.blocks) : null;
      const found = [];
      let rest = performance.now();
      for (const i of candidates) {
        if (this.rows[i].some((cell, c) => cell !== null && this.show(this.columns[c], cell).toLowerCase().includes(query))) found.push(i);
        else if (store && holds((await block(store, i))[i % store.size], query)) found.push(i);
        if (performance.now() - rest > 40) {
          this.count.textContent = "searching …";
          await new Promise((go) => setTimeout(go));
          if (turn !== this.turn) return [];
          rest = performance.now();
        }
      }
      return found;
    }

    say() {
      const all = this.rows.length.toLocaleString("en-US");
      const noun = this.rows.length === 1 ? this.noun.replace(/s$/, "") : this.noun;
      const some = this.found.length.toLocaleString("en-US");
      this.count.textContent = this.found.length === this.rows.length ? `${all} ${noun}` : `${some} of ${all} ${noun}`;
    }

    /** Which columns there is room for. */
    lay() {
      const phone = this.root.clientWidth < 640;
      if (phone === this.phone) return;
      this.phone = phone;
      this.shown = new Set(this.columns.filter((c) => c.phone || !phone));
      this.root.style.setProperty("--columns", [...this.shown].map((c) => c.width).join(" "));
      this.columns.forEach((column, i) => { this.head.children[i].hidden = !this.shown.has(column); });
      this.clear();
    }

    clear() {
      this.drawn = new Map();  // place -> its element
      this.space.replaceChildren();
    }

    /** The rows in sight. Those that are there stay: an element exchanged under a pressed button gets no click. */
    draw() {
      const from = Math.max(0, Math.floor(this.body.scrollTop / HEIGHT) - SPARE);
      const to = Math.min(this.found.length, Math.ceil((this.body.scrollTop + this.body.clientHeight) / HEIGHT) + SPARE);
      for (const [place, row] of this.drawn) {
        if (place >= from && place < to) continue;
        row.remove();
        this.drawn.delete(place);
      }
      let next = this.space.firstChild;
      for (let place = from; place < to; place++) {
        if (!this.drawn.has(place)) {
          this.drawn.set(place, this.row(place));
          this.space.insertBefore(this.drawn.get(place), next);
        }
        next = this.drawn.get(place).nextSibling;
      }
    }

    row(place) {
      const i = this.found[place];
      const row = make("div", "grid-row");
      row.setAttribute("role", "row");
      row.setAttribute("aria-rowindex", place + 1);
      row.dataset.row = i;
      row.style.transform = `translateY(${place * HEIGHT}px)`;
      if (i === this.current) row.setAttribute("aria-selected", "true");
      this.columns.forEach((column, c) => {
        if (!this.shown.has(column)) return;
        const value = this.rows[i][c];
        const kind = column.kind === "mark" && value !== null ? `mark ${value ? "good" : "bad"}` : column.kind;
        const cell = make("div", kind, make("bdi", "", this.show(column, value)));
        cell.setAttribute("role", "gridcell");
        if (this.pick && !row.firstChild) cell.prepend(this.box(i));
        row.append(cell);
      });
      row.addEventListener("click", () => this.open(i));
      return row;
    }

    /** The box that ticks row i. */
    box(i) {
      const box = make("input", "");
      Object.assign(box, { type: "checkbox", checked: this.picked.has(i), tabIndex: -1 });
      box.setAttribute("aria-label", `Tick row ${i + 1}`);
      box.addEventListener("click", (event) => event.stopPropagation());
      box.addEventListener("change", () => {
        if (box.checked) this.picked.add(i); else this.picked.delete(i);
        this.bar.hidden = !this.picked.size;
        this.bar.replaceChildren(...report.picks[this.pick]([...this.picked]));
      });
      return box;
    }

    key(event) {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (step) {
        event.preventDefault();
        this.select(this.next(step) ?? this.found[0]);
      } else if (event.key === "Enter" && this.current !== null) this.open(this.current);
    }

    /** The row before or after the current one among those found; null at the end. */
    next(step) {
      const place = this.found.indexOf(this.current);
      return place < 0 ? null : this.found[place + step] ?? null;
    }

    select(i) {
      if (i === undefined) return;
      this.space.querySelector("[aria-selected]")?.removeAttribute("aria-selected");
      this.current = i;
      const top = this.found.indexOf(i) * HEIGHT;
      const { scrollTop, clientHeight } = this.body;
      if (top < scrollTop) this.body.scrollTop = top;
      else if (top + HEIGHT > scrollTop + clientHeight) this.body.scrollTop = top + HEIGHT - clientHeight;
      this.draw();
      this.drawn.get(this.found.indexOf(i))?.setAttribute("aria-selected", "true");
    }

    async open(i) {
      this.select(i);
      if (!this.detail) return;
      const item = this.blocks ? await report.blocks(this.blocks).get(i) : null;
      report.panel(this, i, await report.details[this.detail](this.rows[i], item, i));
    }
  }

  const block = (store, i) => store.load(Math.floor(i / store.size));

  /** Whether a string anywhere in this JSON value holds the query; keys are not read. */
  function holds(value, query) {
    if (typeof value === "string") return value.toLowerCase().includes(query);
    return value !== null && typeof value === "object" && Object.values(value).some((part) => holds(part, query));
  }

  /** Texts by their digits' value. */
  function compare(a, b) {
    if (typeof a === "string" && typeof b === "string") return collator.compare(a, b);
    return a < b ? -1 : a > b ? 1 : 0;
  }
  const collator = new Intl.Collator("en", { numeric: true });

  report.openRow = (name, i) => grids.get(name).open(i);
  report.start.push(() => {
    for (const root of document.querySelectorAll("[data-grid]")) grids.set(root.dataset.grid, new Grid(root));
    const follow = () => {
      const [name, row] = location.hash.slice(1).split("=");
      const grid = grids.get(name);
      if (grid && /^\d+$/.test(row) && Number(row) < grid.rows.length && grid.current !== Number(row)) grid.open(Number(row));
    };
    addEventListener("hashchange", follow);
    follow();
  });
})();
