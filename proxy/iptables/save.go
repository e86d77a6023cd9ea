package iptables

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"strings"
)

// maxLine is longer than any rule.
const maxLine = 1 << 20

// readSave reads what the kernel holds while it is being printed.
func readSave(ctx context.Context, kernel Kernel) (t tables, err error) {
	err = kernel.Save(ctx, func(out io.Reader) error {
		t, err = parseSave(out)
		return err
	})
	return t, err
}

// parseSave reads what iptables-save prints. Of each table it keeps our own chains and the built-in
// ones. An output that breaks off is an error: what is missing in it is not missing in the kernel.
func parseSave(out io.Reader) (tables, error) {
	t := tables{nat: chains{}, filter: chains{}}
	var in chains // nil inside a table that is not ours
	table := ""
	scanner := bufio.NewScanner(out)
	scanner.Buffer(nil, maxLine)
	for scanner.Scan() {
		line := scanner.Text()
		switch {
		case strings.HasPrefix(line, "#"):
			if strings.Contains(line, "is incompatible") &&
				(strings.Contains(line, "`nat'") || strings.Contains(line, "`filter'")) {
				return tables{}, fmt.Errorf("iptables-save: %s", strings.Trim(line, "# "))
			}
		case strings.HasPrefix(line, "*"):
			if table != "" {
				return tables{}, fmt.Errorf("iptables-save: table %s does not end", table)
			}
			table = line[1:]
			in = map[string]chains{"nat": t.nat, "filter": t.filter}[table]
		case line == "COMMIT":
			table, in = "", nil
		case in == nil:
		case strings.HasPrefix(line, ":"):
			name, rest, _ := strings.Cut(line[1:], " ")
			if strings.HasPrefix(name, prefix) || !strings.HasPrefix(rest, "-") { // built-in chains have a policy
				in[name] = nil
			}
		case strings.HasPrefix(line, "-A "):
			name, rule, _ := strings.Cut(line[3:], " ")
			if _, ours := in[name]; ours {
				in[name] = append(in[name], rule)
			}
		}
	}
	if err := scanner.Err(); err != nil {
		return tables{}, fmt.Errorf("iptables-save: %w", err)
	}
	if table != "" {
		return tables{}, fmt.Errorf("iptables-save: the output ends within table %s", table)
	}
	return t, nil
}
