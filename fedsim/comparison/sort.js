document.documentElement.classList.add("sortable");
for (const button of document.querySelectorAll("th > button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, body = head.closest("table").tBodies[0];
    const column = head.cellIndex, down = head.getAttribute("aria-sort") === "ascending";
    const key = (row) => row.cells[column].dataset.value;
    const rows = Array.from(body.rows, (row) => [key(row), row]);
    const numbers = rows.every(([value]) => value === "" || !Number.isNaN(Number(value)));
    rows.sort(([a], [b]) => {
      if (a === "" || b === "") return (a === "") - (b === "");
      const order = numbers ? a - b : a.localeCompare(b, "en", { numeric: true });
      return down ? -order : order;
    });
    body.append(...rows.map(([, row]) => row));
    for (const other of head.parentElement.cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
  });
}
