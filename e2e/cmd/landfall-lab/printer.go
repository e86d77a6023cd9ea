package main

import (
	"fmt"
	"io"
	"strings"
	"time"
)

// printer writes what a person reads: headings with the seconds since the start, small tables,
// lines of progress.
type printer struct {
	out   io.Writer
	start time.Time
}

func newPrinter(out io.Writer) *printer { return &printer{out: out, start: time.Now()} }

func (p *printer) elapsed() string { return fmt.Sprintf("%5.1f s", time.Since(p.start).Seconds()) }

// progress says what is being done while nothing else is to be shown.
func (p *printer) progress(line string) {
	fmt.Fprintf(p.out, "  [%s] %s\n", p.elapsed(), line)
}

// section begins a part.
func (p *printer) section(title string) {
	rule := strings.Repeat("─", max(4, 92-len([]rune(title))))
	fmt.Fprintf(p.out, "\n── %s %s %s\n\n", title, rule, p.elapsed())
}

func (p *printer) line(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if text != "" {
		text = "  " + text
	}
	fmt.Fprintln(p.out, text)
}

// table prints rows in columns as wide as needed.
func (p *printer) table(rows [][]string) {
	var widths []int
	for _, row := range rows {
		for i, cell := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], len([]rune(cell)))
		}
	}
	for _, row := range rows {
		var b strings.Builder
		for i, cell := range row {
			b.WriteString(cell)
			if i < len(row)-1 {
				b.WriteString(strings.Repeat(" ", widths[i]-len([]rune(cell))+3))
			}
		}
		p.line("%s", b.String())
	}
}

// promise prints what holds, or returns that it does not.
func (p *printer) promise(holds bool, format string, args ...any) error {
	if !holds {
		return fmt.Errorf("not as promised: "+format, args...)
	}
	p.line("✓ "+format, args...)
	return nil
}
