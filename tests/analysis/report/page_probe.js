// Find problems of the open page that a reader would see. Returns lists of descriptions; all are empty if there are none.
(() => {
  const describe = (element) => `${element.tagName.toLowerCase()} "${element.textContent.trim().slice(0, 40)}"`;
  const colour = (text) => {
    const parts = text.match(/[\d.]+/g).map(Number);
    return { rgb: parts.slice(0, 3), alpha: parts.length > 3 ? parts[3] : 1 };
  };
  const over = (top, alpha, below) => top.map((value, i) => alpha * value + (1 - alpha) * below[i]);
  const background = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(colour(getComputedStyle(at).backgroundColor));
    return layers.reduceRight((below, layer) => over(layer.rgb, layer.alpha, below), [255, 255, 255]);
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const opacity = (element) => {
    let product = 1;
    for (let at = element; at; at = at.parentElement) product *= Number(getComputedStyle(at).opacity);
    return product;
  };

  // Vega draws axis labels that would collide with opacity 0.
  const shown = (element) => element.checkVisibility() && opacity(element) > 0;

  const texts = new Map(); // every visible element with text of its own
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (walker.currentNode.data.trim() && shown(parent)) texts.set(parent, true);
  }

  const faint = [];
  const known = new Map();
  for (const element of texts.keys()) {
    const style = getComputedStyle(element);
    const inSvg = element instanceof SVGElement;
    const ink = inSvg ? style.fill : style.color;
    const below = background(inSvg ? element.closest("svg").parentElement : element);
    const alpha = opacity(element) * (inSvg ? Number(style.fillOpacity) : 1);
    const key = `${ink} ${below} ${alpha}`;
    if (!known.has(key)) {
      const { rgb, alpha: own } = colour(ink);
      const pair = [luminance(over(rgb, own * alpha, below)), luminance(below)].sort((a, b) => b - a);
      known.set(key, (pair[0] + 0.05) / (pair[1] + 0.05));
    }
    if (known.get(key) < 4.5) faint.push(`${describe(element)}: ${known.get(key).toFixed(2)}`);
  }

  const touching = [];
  const slack = 1.5; // px: boxes of text are taller than the letters
  for (const svg of document.querySelectorAll("svg.fig")) {
    const boxes = [...svg.querySelectorAll("text")]
      .filter((text) => text.textContent.trim() && shown(text))
      .map((text) => ({ text, box: text.getBoundingClientRect() }));
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b) => {
      const wide = Math.min(a.box.right, b.box.right) - Math.max(a.box.left, b.box.left);
      const high = Math.min(a.box.bottom, b.box.bottom) - Math.max(a.box.top, b.box.top);
      if (wide > slack * scale && high > 3 * slack * scale)
        touching.push(`${svg.parentElement.id}: ${describe(a.text)} and ${describe(b.text)}`);
    }));
  }

  const overhanging = [...document.querySelectorAll("main *, header *, footer *")]
    .filter((e) => !(e instanceof SVGElement && e.tagName !== "svg") && !e.closest(".scroll > *") && e.checkVisibility())
    .filter((e) => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .map(describe);

  const dead = [...document.querySelectorAll('a[href^="#"]')]
    .map((link) => decodeURIComponent(link.hash.slice(1)))
    .filter((id) => !document.getElementById(id));

  const nameless = [...document.querySelectorAll("svg, img")]
    .filter((image) => !(image.getAttribute("aria-label") || image.getAttribute("alt") || "").trim())
    .map((image) => image.outerHTML.slice(0, 80));

  const root = document.documentElement;
  return {
    faint, touching, overhanging, nameless,
    dead: [...new Set(dead)],
    overflow: root.scrollWidth > root.clientWidth ? [`${root.scrollWidth} px in ${root.clientWidth}`] : [],
    counted: { texts: texts.size, figures: document.querySelectorAll("svg.fig").length },
  };
})()
