package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"
)

// machine is what ran, and where.
type machine struct {
	Began      time.Time `json:"began"`
	Commit     string    `json:"commit"`
	Processors int       `json:"processors"`
	Model      string    `json:"model"`
	MemoryGiB  int       `json:"memory_gib"`
	Kernel     string    `json:"kernel"`
	Go         string    `json:"go"`
	KubeProxy  string    `json:"kube_proxy,omitempty"`
	// Load is the average of a minute when the run began: what else the machine does.
	Load string `json:"load"`
}

// describe says what is known of the machine; what cannot be found out stays empty.
func describe(ctx context.Context, repository string) machine {
	m := machine{Began: time.Now().UTC(), Processors: runtime.NumCPU(), Go: runtime.Version(),
		Kernel: firstLine(ctx, "uname", "-r"),
		Commit: firstLine(ctx, "git", "-C", repository, "describe", "--always", "--dirty")}
	text, _ := os.ReadFile("/proc/loadavg")
	m.Load, _, _ = strings.Cut(string(text), " ")
	text, _ = os.ReadFile("/proc/cpuinfo")
	_, after, _ := strings.Cut(string(text), "model name")
	after, _, _ = strings.Cut(after, "\n")
	m.Model = strings.TrimLeft(after, "\t :")
	text, _ = os.ReadFile("/proc/meminfo")
	var kib int
	_, _ = fmt.Sscanf(string(text), "MemTotal: %d", &kib)
	m.MemoryGiB = (kib + 1<<19) >> 20
	return m
}

// firstLine returns the first line that a program prints; nothing if it fails.
func firstLine(ctx context.Context, argv ...string) string {
	out, _ := exec.CommandContext(ctx, argv[0], argv[1:]...).Output()
	line, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	return line
}
