package iptables

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"time"

	goiptables "github.com/coreos/go-iptables/iptables"

	"github.com/landfall-lb/landfall/internal/lb"
)

// commandTimeout is how long a command may take. A large ruleset needs seconds; waiting for other
// users of iptables comes on top.
const (
	commandTimeout = 60 * time.Second
	lockWait       = "5" // seconds
)

// Kernel reads and writes the rules of one address family.
type Kernel interface {
	// Save hands over the rules of all tables as iptables-save prints them, while it does. What was
	// read before an error counts for nothing.
	Save(ctx context.Context, read func(io.Reader) error) error
	// Restore hands input to iptables-restore --noflush.
	Restore(ctx context.Context, input string) error
}

// Commands is a Kernel that is reached through the iptables programs.
type Commands struct {
	// Save and Restore commands by name, such as iptables-nft-save.
	save, restore string
	// start starts a process that writes; may be nil.
	start func(*exec.Cmd) error
}

var _ Kernel = Commands{}

// Detect finds the programs for a family. Where both variants are installed it takes the one that
// the node's other agents use, as rules of one variant do not see those of the other; nft when
// there is no trace of either.
func Detect(ctx context.Context, family lb.Family) (Commands, error) {
	name, protocol := "iptables", goiptables.ProtocolIPv4
	if family == lb.IPv6 {
		name, protocol = "ip6tables", goiptables.ProtocolIPv6
	}
	ipt, err := goiptables.New(goiptables.IPFamily(protocol))
	if err != nil {
		return Commands{}, fmt.Errorf("%s: %w", name, err)
	}
	v1, v2, v3 := ipt.GetIptablesVersion()
	if !ipt.HasRandomFully() {
		return Commands{},
			fmt.Errorf("%s %d.%d.%d is too old: 1.6.2 is the oldest that can masquerade at random ports", name, v1, v2, v3)
	}
	commands := Commands{save: name + "-save", restore: name + "-restore"}
	for _, variant := range []string{"-nft", "-legacy"} {
		c := Commands{save: name + variant + "-save", restore: name + variant + "-restore"}
		if _, err := exec.LookPath(c.save); err != nil {
			continue
		}
		// Unlike iptables-save -t, this creates no table.
		used := false
		err := c.Save(ctx, func(out io.Reader) (err error) {
			used, err = usedByAgents(out)
			return err
		})
		if err == nil && used {
			commands = c
			break
		}
	}
	if err := commands.Save(ctx, func(io.Reader) error { return nil }); err != nil {
		return Commands{}, err
	}
	if losesMasks(v1, v2, v3) && !commands.Legacy(ctx) {
		return Commands{}, fmt.Errorf("%s %d.%d.%d loses masks of addresses such as 0.0.0.127: "+
			"want 1.8.8 or later, as in Landfall's image, or the legacy variant", commands, v1, v2, v3)
	}
	return commands, nil
}

// losesMasks reports whether the nft variant of a version takes a mask that begins with a zero byte for none, which the
// kernel refuses. We sort addresses into chains by their last bits.
func losesMasks(v1, v2, v3 int) bool { return v1 == 1 && v2 == 8 && (v3 == 6 || v3 == 7) }

// usedByAgents reports whether rules carry traces of the kubelet, kube-proxy, or Landfall.
func usedByAgents(saved io.Reader) (bool, error) {
	scanner := bufio.NewScanner(saved)
	scanner.Buffer(nil, maxLine)
	for scanner.Scan() {
		for _, trace := range []string{":KUBE-IPTABLES-HINT ", ":KUBE-KUBELET-CANARY ", ":KUBE-PROXY-CANARY ",
			":KUBE-SERVICES ", ":" + chainServices + " "} {
			if strings.HasPrefix(scanner.Text(), trace) {
				return true, nil
			}
		}
	}
	return false, scanner.Err()
}

// Watched returns commands whose writing w takes for ours.
func (c Commands) Watched(w *Watcher) Commands {
	c.start = w.start
	return c
}

// Legacy reports whether they are of the legacy variant, whose changes the kernel does not report.
func (c Commands) Legacy(ctx context.Context) bool {
	var version []byte
	err := c.run(ctx, "", func(out io.Reader) (err error) {
		version, err = io.ReadAll(out)
		return err
	}, c.restore, "--version")
	return err == nil && strings.Contains(string(version), "legacy")
}

// String names the variant, for logs.
func (c Commands) String() string { return strings.TrimSuffix(c.restore, "-restore") }

// Save implements Kernel.
func (c Commands) Save(ctx context.Context, read func(io.Reader) error) error {
	return c.run(ctx, "", read, c.save)
}

// Restore implements Kernel.
func (c Commands) Restore(ctx context.Context, input string) error {
	// What has begun is finished also when we are asked to end, rather than cut off between two
	// tables.
	return c.run(context.WithoutCancel(ctx), input, func(io.Reader) error { return nil }, c.restore, "--noflush",
		"--wait="+lockWait)
}

// run starts a command, and returns when it has ended and read has taken what it wants of what it
// prints.
func (c Commands) run(
	ctx context.Context, input string, read func(io.Reader) error, name string, args ...string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, commandTimeout, errors.New("took longer than "+commandTimeout.String()))
	defer cancel()
	var stderr strings.Builder
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin, cmd.Stderr = strings.NewReader(input), &stderr
	start := (*exec.Cmd).Start
	if c.start != nil && input != "" {
		start = c.start
	}
	var readErr error
	stdout, err := cmd.StdoutPipe()
	if err == nil {
		err = start(cmd)
	}
	if err == nil {
		readErr = read(stdout)
		_, _ = io.Copy(io.Discard, stdout) // what nobody wants must not hold it up; if this fails, so does the command
		err = cmd.Wait()
	}
	switch {
	case err == nil:
		return readErr
	case ctx.Err() != nil:
		return fmt.Errorf("%s: %w", name, context.Cause(ctx))
	default:
		return fmt.Errorf("%s: %w%s", name, err, explain(stderr.String(), input))
	}
}

// explain shortens what a command complained about to one line, and adds the line of the input that
// it names.
func explain(complaint, input string) string {
	complaint = strings.Join(strings.Fields(complaint), " ")
	if complaint == "" {
		return ""
	}
	complaint = ": " + complaint
	var number int
	for i := range len(complaint) {
		if n, _ := fmt.Sscanf(complaint[i:], "line %d", &number); n == 1 {
			break
		}
		if n, _ := fmt.Sscanf(complaint[i:], "line: %d", &number); n == 1 {
			break
		}
	}
	if lines := strings.Split(input, "\n"); number > 0 && number <= len(lines) && lines[number-1] != "COMMIT" {
		complaint += fmt.Sprintf(" (%q)", lines[number-1])
	}
	return complaint
}
