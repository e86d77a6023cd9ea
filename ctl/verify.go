package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/landfall-lb/landfall/ctl/verify"
	"github.com/landfall-lb/landfall/internal/lb"
)

// verifyOptions are the flags of landfallctl verify.
type verifyOptions struct {
	selector, service, pods string
	port                    uint16
	wait                    time.Duration
}

func verifyCommand(o *options) *cobra.Command {
	var v verifyOptions
	cmd := &cobra.Command{
		Use: "verify", Short: "Check that an installation works, with a Service that is created and deleted",
		Long: "Check that an installation works: Landfall's programs are ready, a pool and an advertisement exist, and a " +
			"Service gets an address that is announced and answers.\n\nWithout --service, verify creates the Service " +
			verify.TestService + " in Landfall's namespace and deletes it. Only a pod can stand behind it, so elsewhere than " +
			"in helm test verify does not connect to it.",
		Example: "  helm test landfall -n landfall-system\n  landfallctl verify --service default/web",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runVerify(cmd.Context(), o, v, cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVar(&v.selector, "landfall-selector", "app.kubernetes.io/name=landfall",
		"`labels` of Landfall's Deployments and DaemonSets")
	f.StringVar(&v.service, "service", "", "`namespace/name` of a Service to check in place of a new one")
	f.StringVar(&v.pods, "pod-labels", "",
		"`labels` of the pod that runs verify, as name=value separated by commas: the new Service leads to the pod")
	f.Uint16Var(&v.port, "port", 8080, "with --pod-labels, TCP `port` that verify serves")
	f.DurationVar(&v.wait, "wait", time.Minute, "how long to wait for each check")
	o.addOutput(cmd, "json", "yaml")
	return cmd
}

// runVerify checks an installation, and prints what is wrong.
func runVerify(ctx context.Context, o *options, flags verifyOptions, stdout io.Writer) error {
	done := verified{Checks: []string{}}
	say := func(text string) {
		if done.Checks = append(done.Checks, text); o.output == "" {
			fmt.Fprintf(stdout, "ok: %s\n", text)
		}
	}
	v := verify.Options{Say: say, Namespace: o.home(), Selector: flags.selector, Class: o.class,
		Port: flags.port, Timeout: flags.wait, Dial: new(net.Dialer).DialContext, Listen: net.Listen}
	if flags.service != "" {
		namespace, name, ok := strings.Cut(flags.service, "/")
		if !ok {
			return fmt.Errorf("--service: %q is not NAMESPACE/NAME", flags.service)
		}
		v.Service = lb.Key{Namespace: namespace, Name: name}
	}
	var err error
	if v.Pods, err = parseLabels(flags.pods); err != nil {
		return fmt.Errorf("--pod-labels: %w", err)
	}
	answer, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	client, _, err := o.connect(answer)
	if err != nil {
		return o.late(answer, client, err)
	}
	v.API = client
	text := ""
	if err := verify.Run(ctx, v); err != nil {
		done.Wrong = err.Error()
		text = "wrong: " + done.Wrong + "\n"
	}
	if err := write(stdout, o.output, done, text); err != nil {
		return err
	}
	if done.Wrong != "" {
		return errWrong
	}
	return nil
}

// verified is what verify found.
type verified struct {
	// Checks are those that ended well; Wrong says which one did not, and is "" if all did.
	Checks []string `json:"checks"`
	Wrong  string   `json:"wrong,omitempty"`
}

// parseLabels reads name=value separated by commas.
func parseLabels(list string) (map[string]string, error) {
	labels := map[string]string{}
	if list == "" {
		return labels, nil
	}
	for pair := range strings.SplitSeq(list, ",") {
		name, value, ok := strings.Cut(pair, "=")
		if !ok {
			return nil, fmt.Errorf("%q is not name=value", pair)
		}
		labels[strings.TrimSpace(name)] = strings.TrimSpace(value)
	}
	return labels, nil
}
