(() => {
  "use strict";
  document.documentElement.classList.add("js");

  // Tooltips: the drawings carry <title>s, which show late and not on touch screens.
  const tip = document.getElementById("tip");
  for (const title of document.querySelectorAll("svg .tip > title")) {
    title.parentNode.dataset.tip = title.textContent;
    title.remove();
  }
  const place = (event) => {
    const mark = event.target.closest ? event.target.closest("[data-tip]") : null;
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.dataset.tip;
    const box = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - box.width - 8);
    const above = event.clientY - box.height - 12;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = (above < 8 ? event.clientY + 18 : above) + "px";
  };
  document.addEventListener("pointermove", place);
  document.addEventListener("pointerdown", place);
  document.documentElement.addEventListener("pointerleave", () => { tip.hidden = true; });
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });

  // Folded parts are open on paper, also in browsers whose style sheets cannot open them.
  const folded = () => [...document.querySelectorAll("details:not([open])")];
  let opened = [];
  addEventListener("beforeprint", () => { opened = folded(); for (const part of opened) part.open = true; });
  addEventListener("afterprint", () => { for (const part of opened) part.open = false; });

  // The table of clients: all of them as columns, one page of rows in the document. Clients with
  // equal cells are of one kind; its members are the first number and the steps to the next ones.
  const source = document.getElementById("clients-data");
  if (!source) return;
  const { keys, kinds, members, names, sorted_by } = JSON.parse(source.textContent);
  const columns = keys.map(() => []);
  const named = keys.includes("name");
  members.forEach((steps, kind) => {
    let client = 0;
    for (const step of steps) {
      client += step;
      const row = named ? [client, names[client], ...kinds[kind]] : [client, ...kinds[kind]];
      row.forEach((cell, column) => columns[column].push(cell));
    }
  });
  const count = columns.length ? columns[0].length : 0;
  const at = (key) => keys.indexOf(key);
  const table = document.getElementById("clients");
  const body = table.tBodies[0];
  const tools = document.getElementById("clients-tools");
  const find = document.getElementById("find");
  const least = document.getElementById("least");
  const note = document.getElementById("note");
  const said = document.getElementById("clients-said");
  const pager = document.getElementById("clients-pager");
  const size = 50;
  const state = { key: sorted_by, falling: sorted_by === "epsilon", page: 0, rows: [] };

  const number = (value) => {
    if (typeof value === "number") return value;
    if (value === "\u221e") return Infinity;
    return value === "\u2013" ? -Infinity : Number(value.replace("%", ""));
  };
  const numbers = {};
  const values = (key) => {
    if (!numbers[key]) {
      const column = columns[at(key)];
      numbers[key] = key === "notes" || key === "name" ? column : column.map(number);
    }
    return numbers[key];
  };
  const compare = (one, other) => (one < other ? -1 : one > other ? 1 : 0);

  // "3, 10-20" as a list of [from, to]; null where it is not such a list.
  const ranges = (text) => {
    const parts = text.split(/[\s,;]+/).filter(Boolean);
    const found = parts.map((part) => /^(\d+)(?:[-\u2013](\d+))?$/.exec(part));
    if (found.includes(null)) return null;
    return found.map(([, from, to]) => [Number(from), Number(to === undefined ? from : to)]);
  };

  const chosen = () => {
    const wanted = ranges(find.value), called = columns[at("name")], part = find.value.trim().toLowerCase();
    find.setAttribute("aria-invalid", String(wanted === null && !called));
    const floor = !least || least.value === "" ? -Infinity : Number(least.value);
    const kind = note ? note.value : "";
    const clients = values("client"), notes = columns[at("notes")];
    const rows = [];
    for (let row = 0; row < count; row++) {
      if (wanted === null && !(called && called[row].toLowerCase().includes(part))) continue;
      if (wanted && wanted.length && !wanted.some(([from, to]) => from <= clients[row] && clients[row] <= to)) continue;
      if (least && values("epsilon")[row] < floor) continue;
      if (kind && !notes[row].includes(kind)) continue;
      rows.push(row);
    }
    const sorted = values(state.key), sign = state.falling ? -1 : 1;
    return rows.sort((a, b) => sign * compare(sorted[a], sorted[b]) || compare(clients[a], clients[b]));
  };

  const show = () => {
    const last = Math.max(0, Math.ceil(state.rows.length / size) - 1);
    state.page = Math.min(Math.max(state.page, 0), last);
    const first = state.page * size;
    const shown = state.rows.slice(first, first + size);
    const fragment = document.createDocumentFragment();
    for (const row of shown) {
      const line = document.createElement("tr");
      keys.forEach((key, column) => {
        const cell = document.createElement(column === 0 ? "th" : "td");
        if (column === 0) cell.scope = "row";
        const value = columns[column][row];
        const plain = key === "client" || typeof value !== "number";
        cell.textContent = plain ? String(value) : value.toLocaleString("en-US");
        cell.className = key;
        line.append(cell);
      });
      if (columns[at("notes")][row].includes("largest \u03b5")) line.className = "worst";
      fragment.append(line);
    }
    if (!shown.length) {
      const cell = document.createElement("td");
      cell.colSpan = keys.length;
      cell.className = "empty";
      cell.textContent = "No client fits.";
      const line = document.createElement("tr");
      line.append(cell);
      fragment.append(line);
    }
    body.replaceChildren(fragment);
    const total = state.rows.length.toLocaleString("en-US");
    const all = count.toLocaleString("en-US");
    const which = shown.length
      ? (first + 1).toLocaleString("en-US") + "\u2013" + (first + shown.length).toLocaleString("en-US") + " of " + total
      : "0";
    said.textContent = which + (state.rows.length === count ? " clients" : " that fit, of " + all + " clients");
    for (const button of pager.querySelectorAll("button")) {
      const back = button.dataset.go === "first" || button.dataset.go === "back";
      button.disabled = back ? state.page === 0 : state.page === last;
    }
    pager.hidden = count <= size;
    for (const heading of table.tHead.rows[0].cells) {
      const here = heading.dataset.key === state.key;
      heading.setAttribute("aria-sort", here ? (state.falling ? "descending" : "ascending") : "none");
    }
  };
  const update = () => { state.rows = chosen(); state.page = 0; show(); };

  for (const heading of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    button.addEventListener("click", () => {
      const key = heading.dataset.key;
      const same = state.key === key;
      // Figures are first asked for their largest; names and numbers of clients in order.
      state.falling = same ? !state.falling : key !== "client" && key !== "name";
      state.key = key;
      update();
    });
    heading.replaceChildren(button);
  }
  for (const control of [find, least, note]) if (control) control.addEventListener("input", update);
  tools.addEventListener("submit", (event) => event.preventDefault());
  tools.addEventListener("reset", () => setTimeout(update));
  pager.addEventListener("click", (event) => {
    const go = event.target.dataset.go;
    if (!go) return;
    state.page = { first: 0, back: state.page - 1, next: state.page + 1, last: Infinity }[go];
    show();
  });
  tools.hidden = false;
  update();
})();
