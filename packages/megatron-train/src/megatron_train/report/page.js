// Shows the values under the pointer. The charts are complete without it.
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const { x, lines } = JSON.parse(svg.dataset.chart);
  const tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
  const pointer = document.createElementNS("http://www.w3.org/2000/svg", "line");
  pointer.setAttribute("class", "pointer");
  svg.append(pointer);
  svg.parentElement.append(tip);
  const nearest = (points, step) =>
    points.reduce((best, p) => (Math.abs(p[0] - step) < Math.abs(best[0] - step) ? p : best));
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const step = x[0] + ((at - x[2]) / (x[3] - x[2])) * (x[1] - x[0]);
    if (step < x[0] || step > x[1]) return hide();
    const found = lines.map((line) => [line.name, nearest(line.points, step)]);
    const here = x[2] + ((found[0][1][0] - x[0]) / (x[1] - x[0])) * (x[3] - x[2]);
    for (const end of ["1", "2"]) pointer.setAttribute("x" + end, here);
    pointer.setAttribute("y1", 12);
    pointer.setAttribute("y2", svg.viewBox.baseVal.height - 30);
    tip.textContent = found
      .map(([name, [s, value]]) => `${name}, step ${s}: ${Number(value.toPrecision(6))}`)
      .join("\n");
    tip.hidden = pointer.hidden = false;
    const left = event.clientX - svg.parentElement.getBoundingClientRect().left;
    tip.style.top = "44px";
    tip.style.left = left > box.width / 2 ? "" : `${left + 14}px`;
    tip.style.right = left > box.width / 2 ? `${box.width - left + 38}px` : "";
  });
  const hide = () => {
    tip.hidden = true;
    pointer.setAttribute("y2", 12);
  };
  svg.addEventListener("pointerleave", hide);
}
