// A click on a heading sorts its table: words from a to z first, numbers from the largest; once more turns it round.
// What has no value comes last either way.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  headings.forEach((heading, column) => {
    const numeric = heading.dataset.kind === "number";
    const value = (row) => {
      const found = row.cells[column].dataset.sort;
      return numeric && found !== "" ? Number(found) : found;
    };
    heading.querySelector("button").addEventListener("click", () => {
      const first = numeric ? "descending" : "ascending";
      const second = numeric ? "ascending" : "descending";
      const order = heading.getAttribute("aria-sort") === first ? second : first;
      const sign = order === "ascending" ? 1 : -1;
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        return sign * (numeric ? (x > y) - (x < y) : x.localeCompare(y));
      });
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", order);
      body.append(...rows);
    });
  });
}
