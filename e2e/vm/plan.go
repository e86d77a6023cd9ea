package vm

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

// Program is what the virtual machine starts, one after the other.
type Program struct {
	Name string // unique
	Dir  string // where it starts, in the virtual machine
	Argv []string
	Env  []string
	// Timeout is how long it may run before it is killed.
	Timeout time.Duration
}

// report is one line of what the virtual machine says on its second serial port. Output is text of
// a program; every other line has one of the rest.
type report struct {
	// Kernel is set in the first line, once the virtual machine is up: the release of Linux.
	Kernel  string `json:",omitempty"`
	Program string `json:",omitempty"`
	Output  string `json:",omitempty"`
	Ended   bool   `json:",omitempty"`
	// Error says why the program failed; empty if it did not.
	Error   string        `json:",omitempty"`
	Elapsed time.Duration `json:",omitempty"`
}

// Result is how one program ended.
type Result struct {
	Program string
	Output  string
	Err     error
	Elapsed time.Duration // by the virtual machine's clock
}

// Results are those of a run.
type Results struct {
	Kernel   string // release of Linux
	Programs []Result
}

// errUnfinished says that the virtual machine stopped before it had told how a program ended.
var errUnfinished = errors.New("the virtual machine stopped before the program ended")

// collect reads reports until there are no more. It calls up once the machine has started, and heard
// for each line of a program's output. Programs of the plan that did not end have an error.
func collect(r io.Reader, plan []Program, up func(), heard func(program, line string)) (Results, error) {
	var results Results
	outputs, partial, ended := map[string]*strings.Builder{}, map[string]string{}, map[string]Result{}
	for _, p := range plan {
		outputs[p.Name] = &strings.Builder{}
	}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var said report
		if err := json.Unmarshal(lines.Bytes(), &said); err != nil {
			return results, fmt.Errorf("read %q of the virtual machine: %w", lines.Text(), err)
		}
		if said.Kernel != "" {
			results.Kernel = said.Kernel
			up()
			continue
		}
		if outputs[said.Program] == nil {
			return results, fmt.Errorf("the virtual machine reports on %q, which is not in the plan", said.Program)
		}
		outputs[said.Program].WriteString(said.Output)
		text := partial[said.Program] + said.Output
		for line, rest, found := strings.Cut(text, "\n"); found; line, rest, found = strings.Cut(text, "\n") {
			heard(said.Program, line)
			text = rest
		}
		partial[said.Program] = text
		if said.Ended {
			result := Result{Elapsed: said.Elapsed}
			if said.Error != "" {
				result.Err = errors.New(said.Error)
			}
			ended[said.Program] = result
		}
	}
	for _, p := range plan {
		result, ok := ended[p.Name]
		if !ok {
			result.Err = errUnfinished
		}
		result.Program, result.Output = p.Name, outputs[p.Name].String()
		results.Programs = append(results.Programs, result)
	}
	return results, lines.Err()
}
