package main

import (
	"cmp"
	"fmt"
	"html"
	"math"
	"slices"
	"strings"
)

// plot is a chart of lines over numbers of Services, both axes logarithmic. It draws itself: the libraries
// for plots bring fonts, PDF and a dozen modules more than five lines need.
type plot struct {
	title, unit string
	lines       []line
}

// line is what one program did at each number of Services.
type line struct {
	name   string
	points []point
}

type point struct{ services, value float64 }

// The chart's size and where its axes are, in pixels.
const (
	plotWidth, plotHeight   = 760, 360
	plotLeft, plotRight     = 70, 560
	plotTop, plotBottom     = 40, 310
	legendLeft, legendPitch = 580, 22
)

// palette are colors that differ also for those who do not see all of them (Okabe and Ito).
var palette = []string{"#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#888888", "#009e73", "#cc79a7"}

// svg draws the chart.
func (p plot) svg() string {
	var points []point
	for _, l := range p.lines {
		points = append(points, l.points...)
	}
	x, y := newAxis(points, plotLeft, plotRight, func(p point) float64 { return p.services }),
		newAxis(points, plotBottom, plotTop, func(p point) float64 { return p.value })
	var out strings.Builder
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" `+
		`font-size="12">`+"\n"+`<rect width="100%%" height="100%%" fill="#ffffff"/>`+"\n", plotWidth, plotHeight)
	text := func(x, y float64, anchor, s string) {
		fmt.Fprintf(&out, `<text x="%.0f" y="%.0f" text-anchor="%s">%s</text>`+"\n", x, y, anchor, html.EscapeString(s))
	}
	rule := func(x1, y1, x2, y2 float64) {
		fmt.Fprintf(&out, `<path d="M%.1f %.1fL%.1f %.1f" stroke="#dddddd"/>`+"\n", x1, y1, x2, y2)
	}
	text(plotLeft, plotTop-16, "start", p.title+", "+p.unit)
	for _, tick := range x.ticks() {
		rule(x.at(tick), plotTop, x.at(tick), plotBottom)
		text(x.at(tick), plotBottom+18, "middle", number(tick))
	}
	for _, tick := range y.ticks() {
		rule(plotLeft, y.at(tick), plotRight, y.at(tick))
		text(plotLeft-8, y.at(tick)+4, "end", number(tick))
	}
	text((plotLeft+plotRight)/2, plotBottom+38, "middle", "Services")
	for i, l := range p.lines {
		color := palette[i%len(palette)]
		slices.SortFunc(l.points, func(a, b point) int { return cmp.Compare(a.services, b.services) })
		var path []string
		for _, at := range l.points {
			path = append(path, fmt.Sprintf("%.1f %.1f", x.at(at.services), y.at(at.value)))
			fmt.Fprintf(&out, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`+"\n", x.at(at.services), y.at(at.value), color)
		}
		fmt.Fprintf(&out, `<path d="M%s" fill="none" stroke="%s" stroke-width="2"/>`+"\n", strings.Join(path, "L"), color)
		at := float64(plotTop + i*legendPitch)
		fmt.Fprintf(&out, `<path d="M%d %.0fh20" stroke="%s" stroke-width="2"/>`+"\n", legendLeft, at, color)
		text(legendLeft+26, at+4, "start", l.name)
	}
	out.WriteString("</svg>\n")
	return out.String()
}

// axis is a logarithmic axis from low to high, drawn from one pixel to another. Both ends are powers of ten.
type axis struct{ low, high, from, to float64 }

func newAxis(points []point, from, to float64, of func(point) float64) axis {
	a := axis{low: math.Inf(1), high: math.Inf(-1), from: from, to: to}
	for _, p := range points {
		a.low, a.high = min(a.low, math.Floor(math.Log10(of(p)))), max(a.high, math.Ceil(math.Log10(of(p))))
	}
	a.high = max(a.high, a.low+1)
	return a
}

// at returns the pixel of a value.
func (a axis) at(value float64) float64 {
	return a.from + (math.Log10(value)-a.low)/(a.high-a.low)*(a.to-a.from)
}

// ticks returns the powers of ten.
func (a axis) ticks() (values []float64) {
	for e := a.low; e <= a.high; e++ {
		values = append(values, math.Pow(10, e))
	}
	return values
}

// number writes a power of ten with separators, as 10,000 and 0.01.
func number(value float64) string {
	if value < 1 {
		return fmt.Sprintf("%g", value)
	}
	digits := fmt.Sprintf("%.0f", value)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}
