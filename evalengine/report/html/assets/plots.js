"use strict";
// Plots as SVG, drawn for the width that they get: histogram, bars, calibration, runs over time, and a cell's interval.
// Colours come from page.css by class.
(() => {
  const { build, parts } = report;
  const HEIGHT = 180, LEFT = 40, RIGHT = 8, TOP = 22, BOTTOM = 34;  // px; margins around the plotted area
  const FEW = 6;  // values that make bars; fewer are points

  const element = (is, attributes, ...children) => ({ is, ...attributes, in: children });
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  const spoken = (value) => Number.isInteger(value) ? report.number(value, 0) : String(Number(value.toPrecision(4)));

  /** A linear axis from `low` to `high`, drawn from `start` to `end` (px). */
  function axis(low, high, start, end) {
    const place = (value) => Math.round(100 * (start + ((value - low) / (high - low)) * (end - start))) / 100;
    return Object.assign(place, { low, high, start, end });
  }

  /** Round values (1, 2 or 5 times a power of ten apart) within [low, high]. */
  function ticks({ low, high }, whole) {
    const power = 10 ** Math.floor(Math.log10((high - low) / 5));
    const step = power * [1, 2, 5, 10].find((factor) => (high - low) / (power * factor) <= 5);
    const first = Math.ceil(low / step - 1e-9), count = Math.floor(high / step + 1e-9) - first + 1;
    const values = Array.from({ length: count }, (_, i) => Number(((first + i) * step).toPrecision(12)));
    return values.filter((value) => !whole || Number.isInteger(value));
  }

  /** Horizontal rules and the labels of both axes. whole: whether x and y are labelled at whole numbers only. */
  function frame(x, y, labels, whole, written = spoken) {
    return [
      ...ticks(y, whole[1]).flatMap((value) => [
        element("path", { d: `M${x.start} ${y(value)}H${x.end}`, class: "axis" }),
        element("text", { x: x.start - 6, y: y(value) + 4, class: "end" }, written(value)),
      ]),
      ...ticks(x, whole[0]).map((value) => element("text", { x: x(value), y: y.start + 15, class: "middle" }, spoken(value))),
      element("text", { x: (x.start + x.end) / 2, y: y.start + 30, class: "middle label" }, labels[0]),
      element("text", { x: x.start, y: TOP - 10, class: "label" }, labels[1]),
    ];
  }

  /** draw(width) gives the elements, again whenever the width changes. */
  function plot(title, height, draw) {
    const svg = build(element("svg", { class: "plot", role: "img", "aria-label": title, height }));
    new ResizeObserver(() => {
      if (svg.clientWidth) svg.replaceChildren(build(draw(svg.clientWidth)));
    }).observe(svg);
    return svg;
  }

  /** Stacked counts between edges; edges halfway between whole numbers hold whole numbers. rule: a dashed line there. */
  parts.histogram = ({ edges, layers, x: label, noun, rule }) => plot(`Histogram of ${label}`, HEIGHT, (width) => {
    const totals = edges.slice(1).map((_, i) => layers.reduce((sum, layer) => sum + layer.counts[i], 0));
    const few = totals.reduce((a, b) => a + b, 0) < FEW;
    const whole = edges.every((edge) => Math.abs(edge % 1) === 0.5);
    const x = axis(edges[0], edges.at(-1), LEFT, width - RIGHT), y = axis(0, Math.max(1, ...totals), HEIGHT - BOTTOM, TOP);
    const drawn = totals.flatMap((_, i) => {
      const [low, high] = edges.slice(i, i + 2), [first, last] = whole ? [low + 0.5, high - 0.5] : [low, high];
      const counts = layers.map((layer) => `${spoken(layer.counts[i])} ${layer.name || noun}`).join(", ");
      const title = element("title", {}, `${spoken(first)}${first === last ? "" : ` to ${spoken(last)}`}: ${counts}`);
      let base = 0;
      return layers.flatMap(({ counts: { [i]: count }, style }) => {
        const from = base, look = `mark ${style}`, wide = x(high) - x(low);
        base += count;
        if (few) return Array.from({ length: count }, (_, n) => element("circle", { cx: (x(low) + x(high)) / 2, cy: y(from + n + 1), r: 4, class: look }, title));
        const shape = { x: x(low), y: y(base), width: wide - (wide > 3 ? 0.6 : 0), height: Math.max(y(from) - y(base), 0.8) };
        return count ? [element("rect", { ...shape, class: look }, title)] : [];
      });
    });
    const line = rule === null ? [] : [element("path", { d: `M${x(rule)} ${TOP}V${HEIGHT - BOTTOM}`, class: "rule" })];
    return [...frame(x, y, [label, noun], [whole, true]), ...drawn, ...line];
  });

  /** Horizontal bars: [label, count, style], with each count and its share of `total` > 0. */
  parts.bars = ({ rows, total }) => plot("Counts", 4 + rows.length * 36, (width) => rows.flatMap(([label, count, style], place) => {
    const y = 4 + place * 36, bar = { x: 0, y: y + 16, height: 6, rx: 1 };
    return [
      element("text", { x: 0, y: y + 10 }, label),
      element("text", { x: width, y: y + 10, class: "end value" }, `${spoken(count)}  (${percent(count / total)})`),
      element("rect", { ...bar, width, class: "track" }),
      ...(count ? [element("rect", { ...bar, width: Math.max((width * count) / total, 1), class: `mark ${style}` })] : []),
    ];
  }));

  /** A reliability diagram. points: [mean confidence, share correct, its interval's low and high, count] per bin. */
  parts.calibration = ({ points }) => plot("Share correct by confidence", HEIGHT + 40, (width) => {
    const x = axis(0, 1, LEFT, width - RIGHT), y = axis(0, 1, HEIGHT + 40 - BOTTOM, TOP);
    const biggest = Math.max(1, ...points.map((point) => point[4]));
    const drawn = points.flatMap(([confidence, share, low, high, count]) => {
      const title = element("title", {}, `confidence ${confidence.toFixed(3)}: ${percent(share)} of ${spoken(count)} correct, 95 % interval ${percent(low)} to ${percent(high)}`);
      return [element("path", { d: `M${x(confidence)} ${y(low)}V${y(high)}`, class: "whisker thin" }, title),
        element("circle", { cx: x(confidence), cy: y(share), r: 2.5 + 5 * Math.sqrt(count / biggest), class: "mark" }, title)];
    });
    const labels = ["confidence: probability of the chosen answer", "share correct"];
    const diagonal = element("path", { d: `M${x(0)} ${y(0)}L${x(1)} ${y(1)}`, class: "rule" });
    return [...frame(x, y, labels, [false, false], (value) => `${Math.round(100 * value)} %`), diagonal, ...drawn];
  });

  /** Values in their order, each with its interval or null: [value, interval, title]. */
  parts.series = ({ points, x: across, y: up }) => plot(`${up} of ${points.length} runs`, HEIGHT, (width) => {
    const ends = points.length ? points.flatMap(([value, bounds]) => [value, ...(bounds ?? [])]) : [0], [least, most] = [Math.min(...ends), Math.max(...ends)];
    const room = 0.06 * (most - least) || Math.abs(most) * 0.05 || 0.05;
    const x = axis(0.5, points.length + 0.5, LEFT, width - RIGHT), y = axis(least - room, most + room, HEIGHT - BOTTOM, TOP);
    const drawn = points.flatMap(([value, bounds, text], i) => {
      const title = element("title", {}, text);
      return [...(bounds ? [element("path", { d: `M${x(i + 1)} ${y(bounds[0])}V${y(bounds[1])}`, class: "whisker" }, title)] : []),
        element("circle", { cx: x(i + 1), cy: y(value), r: 3.5, class: "mark" }, title)];
    });
    return [...frame(x, y, [across, up], [true, false]), ...drawn];
  });

  /** A value with its interval, for a table's cell. What lies outside `bounds` is drawn at the edge. rule: a line there. */
  parts.interval = ({ value, low, high, bounds, rule }) => {
    const scale = axis(...bounds, 4, 156), x = (at) => scale(Math.min(Math.max(at, bounds[0]), bounds[1]));
    const label = `${spoken(value)}, from ${spoken(low)} to ${spoken(high)}`;
    return build(element("svg", { viewBox: "0 0 160 18", class: "bar", role: "img", "aria-label": label },
      element("title", {}, label), element("path", { d: "M4 9H156", class: "axis" }),
      ...(rule === null ? [] : [element("path", { d: `M${x(rule)} 1V17`, class: "rule" })]),
      element("path", { d: `M${x(low)} 9H${x(high)}`, class: "whisker" }), element("circle", { cx: x(value), cy: 9, r: 4, class: "mark" })));
  };
})();
