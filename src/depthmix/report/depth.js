"use strict";
const $ = (id) => document.getElementById(id);
// from this share on a background is dark, and its text light; in the dark theme the other way round
const DARK = 0.6;

// every string goes through textContent or an attribute that is no code: a text can hold anything
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    // the page's policy forbids the attribute, not the property
    if (name === "style") node.style.cssText = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
const percent = (share) => (100 * share).toFixed(1) + " %";
const number = (value, digits = 2) => value === null || value === undefined ? "–" : value.toFixed(digits);
const grouped = (value) => value.toLocaleString("en");
const show = (text) => text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣");

// a token's text, whose line ends can be seen and pointed at
function fillToken(node, text) {
  text.split("\n").forEach((line, k) => {
    if (k) node.append(make("i"), "\n");
    node.append(line);
  });
}
function shade(node, kind, share) {
  node.className = share >= DARK ? `${kind} hi` : kind;
  node.style.setProperty("--d", share);
}
function drawScale(node, what, most, name = String) {
  const steps = [];
  for (let d = 0; d <= most; d += Math.max(1, Math.ceil(most / 8))) steps.push(d);
  node.replaceChildren(make("b", { class: "soft" }, what), ...steps.map((d) => {
    const step = make("span", {}, name(d));
    shade(step, "", most ? d / most : 1);
    return step;
  }));
}

const isNarrow = matchMedia("(max-width: 62rem)");
// Pointing, tapping and arrow keys choose a token. A text is one stop for the tab key, however long.
function watchTokens(box, pick) {
  function choose(node) {
    box.querySelector(".on")?.classList.remove("on");
    box.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
    node.classList.add("on");
    node.setAttribute("tabindex", "0");
    pick(Number(node.dataset.i), node);
  }
  for (const kind of ["mouseover", "focusin", "click"]) box.addEventListener(kind, (event) => {
    const node = event.target.closest("[data-i]");
    // a mouse that rests where text moves must not open a sheet
    if (node !== null && !(kind === "mouseover" && isNarrow.matches)) choose(node);
  });
  box.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (by === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const nodes = box.querySelectorAll("[data-i]"), first = Number(nodes[0]?.dataset.i ?? 0);
    const here = Number(box.querySelector('[tabindex="0"]')?.dataset.i ?? first) - first;
    nodes[Math.min(nodes.length - 1, Math.max(0, here + by))]?.focus();
  });
}

// What is shown of a token: beside the text where there is room, else on a sheet that can be closed.
function fillCard(...children) {
  $("card").classList.add("open");
  $("card-text").replaceChildren(...children);
}
function closeCard() {
  $("card").classList.remove("open");
}
$("close").addEventListener("click", closeCard);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !isNarrow.matches || !$("card").classList.contains("open")) return;
  closeCard();
  // that is all that this key shall do
  event.stopImmediatePropagation();
});

// a token's path from the first block to the last; `inside` says of a routed block whether it ran
function drawStrip(numBlocks, routed, inside) {
  const names = { in: "routed", out: "passed by", dense: "dense" };
  return make("ol", { class: "strip", "aria-label": "the path, block by block" }, ...Array.from({ length: numBlocks }, (_, layer) => {
    const k = routed.indexOf(layer), kind = k < 0 ? "dense" : inside(k) ? "in" : "out";
    return make("li", { class: kind, title: `block ${layer}: ${names[kind]}`, "aria-label": `block ${layer}: ${names[kind]}` }, String(layer));
  }));
}
