package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The programs of contenders.
const (
	landfall  = "landfall"
	kubeProxy = "kube-proxy"
)

const ipvs = "ipvs"

// contender is a proxy in one of its modes.
type contender struct{ name, program, mode string }

var all = []contender{
	{"landfall-nftables", landfall, "nftables"},
	{"landfall-iptables", landfall, "iptables"},
	{"kube-proxy-nftables", kubeProxy, "nftables"},
	{"kube-proxy-iptables", kubeProxy, "iptables"},
	{"kube-proxy-ipvs", kubeProxy, ipvs},
}

func contenderNames() (names []string) {
	for _, c := range all {
		names = append(names, c.name)
	}
	return names
}

func (b *bench) contenders() []contender {
	return slices.DeleteFunc(slices.Clone(all), func(c contender) bool { return !slices.Contains(b.proxies, c.name) })
}

// leaveOut leaves out the contenders that this machine cannot run, and has the report say why.
func (b *bench) leaveOut(ctx context.Context) {
	missing := missingForIPVS(ctx)
	b.proxies = slices.DeleteFunc(slices.Clone(b.proxies), func(name string) bool {
		leave := missing != "" && slices.ContainsFunc(all, func(c contender) bool { return c.name == name && c.mode == ipvs })
		if leave {
			b.report.LeftOut = append(b.report.LeftOut, name+" is not measured: "+missing)
		}
		return leave
	})
}

// missingForIPVS returns what kube-proxy lacks for mode ipvs; nothing if it can run.
func missingForIPVS(ctx context.Context) string {
	_ = exec.CommandContext(ctx, "modprobe", "ip_vs").Run() // it may be built in, or loaded
	if _, err := os.Stat("/proc/net/ip_vs"); err != nil {
		return "this kernel has no IPVS (no /proc/net/ip_vs after modprobe ip_vs)"
	}
	if _, err := exec.LookPath("ipset"); err != nil {
		return "there is no program ipset"
	}
	return ""
}

// build builds a program of the repository.
func build(ctx context.Context, repository, folder, name, source string) (path string, err error) {
	path = filepath.Join(folder, name)
	cmd := exec.CommandContext(ctx, "go", "build", "-C", repository, "-trimpath", "-ldflags=-s -w", "-o", path, source)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w: %s", source, err, out)
	}
	return path, nil
}

// proxy is a contender that runs on a node.
type proxy struct {
	contender
	cmd     *exec.Cmd
	log     bytes.Buffer // to be read once done is closed
	started time.Time
	done    chan struct{} // closed once it has ended
}

// startProxy starts a contender on a host of the lab, as the proxy of a node.
func (b *bench) startProxy(c contender, host, node string) (*proxy, error) {
	network := b.lab.Cluster().PodNetwork.String()
	argv := []string{"ip", "netns", "exec", b.lab.Namespace(host), b.programs[c.program]}
	switch c.program {
	case floor:
		argv = append(argv, b.lab.Kubeconfig(), "kube-proxy", floorAddress)
	case landfall:
		argv = append(argv, "--mode="+c.mode, "--kubeconfig="+b.lab.Kubeconfig(), "--node-name="+node,
			"--cluster-cidr="+network,
			"--feed-socket="+filepath.Join(filepath.Dir(b.programs[landfall]), host+".sock"), "--log-level=warn")
	default:
		// The limits of conntrack are the machine's, which is not kube-proxy's here. All else is as it
		// comes.
		argv = append(argv, "--proxy-mode="+c.mode, "--kubeconfig="+b.lab.Kubeconfig(), "--hostname-override="+node,
			"--cluster-cidr="+network,
			"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0s", "--conntrack-tcp-timeout-close-wait=0s")
	}
	return launch(c, argv)
}

// launch starts a program as a contender.
func launch(c contender, argv []string) (*proxy, error) {
	p := &proxy{contender: c, cmd: exec.Command(argv[0], argv[1:]...), started: time.Now(), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	p.cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL, Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = p.cmd.Wait() // how it ended is in its ProcessState
		close(p.done)
	}()
	return p, nil
}

// use has work done with the proxy, and ends it; its rules stay. An error holds what the proxy said. If the proxy ends
// by itself, so does the context of the work, and the error says so, whatever the work says: what a proxy does not do
// that does not run is not late.
func (p *proxy) use(ctx context.Context, work func(context.Context) error) error {
	running, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		<-p.done
		cancel()
	}()
	err := work(running)
	select {
	case <-p.done:
		err = fmt.Errorf("%s ended by itself: %s", p.name, p.cmd.ProcessState)
	default:
		p.stop()
	}
	if err != nil {
		return fmt.Errorf("%w; it said: %s", err, p.log.String())
	}
	return nil
}

// stop ends the proxy and leaves its rules.
func (p *proxy) stop() {
	_ = p.cmd.Process.Signal(unix.SIGTERM)
	late := time.AfterFunc(10*time.Second, func() { _ = p.cmd.Process.Kill() })
	<-p.done
	late.Stop()
}

// flush makes a node one without rules, as a reboot would.
func (b *bench) flush(ctx context.Context, node string) error {
	if slices.Contains(b.proxies, "kube-proxy-"+ipvs) { // which leaves more than rules
		if _, err := b.lab.Exec(ctx, node, b.programs[kubeProxy], "--cleanup"); err != nil {
			return err
		}
	}
	if _, err := b.lab.Exec(ctx, node, "nft", "flush", "ruleset"); err != nil {
		return err
	}
	_, _ = b.lab.Exec(ctx, node, "conntrack", "-F") // fails if there is no entry
	return nil
}

// cpu is the processor time of the proxy and of the programs that it has run to their end, in
// seconds.
func (p *proxy) cpu() (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	_, after, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(after)
	var ticks float64
	for _, field := range fields[11:15] { // utime, stime, cutime, cstime
		n, err := strconv.ParseFloat(field, 64)
		if err != nil {
			return 0, err
		}
		ticks += n
	}
	const ticksPerSecond = 100
	return ticks / ticksPerSecond, nil
}

// peakMemory is the largest resident size so far, in MiB.
func (p *proxy) peakMemory() (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	_, after, found := strings.Cut(string(text), "VmHWM:")
	if !found {
		return 0, fmt.Errorf("no VmHWM of %s", p.name)
	}
	kib, err := strconv.ParseFloat(strings.Fields(after)[0], 64)
	return kib / 1024, err
}
